"""The recurrence of an LSTM whose gates and cell are layer-normalized."""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_models.checks.arguments import checked
from jax_models.ops.affine import carry_dtype
from jax_models.ops.gated.definition import LSTMState, ScanOptions, recurrence
from jax_models.ops.gated.products import Product, Step


class LSTMNorms(NamedTuple):
    """The layer norms of one LSTM: the gates' norms, side by side, and the cell's norm."""

    gate_scale: Float[Array, " 4*hidden"]
    gate_bias: Float[Array, " 4*hidden"]
    cell_scale: Float[Array, " hidden"]
    cell_bias: Float[Array, " hidden"]


@checked(layers=())
def layer_norm_lstm(
    x: Float[Array, "batch time in"],
    state: LSTMState,
    *,
    kernel_ih: Float[Array, "in 4*hidden"],
    kernel_hh: Float[Array, "hidden 4*hidden"],
    bias: Float[Array, " 4*hidden"],
    norms: LSTMNorms,
    **options: Unpack[ScanOptions],
) -> tuple[Float[Array, "batch time hidden"], LSTMState]:
    """Runs a layer-normalized LSTM, with its gates side by side in the order i, f, g, o.

        i, f, g, o = x_t W_ih + h_{t−1} W_hh + b
        c_t, h_t   as `layer_norm_cell` makes them of the gates and c_{t−1}

    `options` are those of `ScanOptions`: `lengths`, `reset`, `rows`, `reverse` and `method`.
    """
    products = {"gates": Product(kernel_hh, None, kernel_ih, bias)}
    return recurrence(_step, state, products, x, params=norms, **options)


def _step(state: LSTMState, now: Step) -> LSTMState:
    return layer_norm_cell(now.product("gates", state.h), state.c, now.params)


def layer_norm_cell(
    gates: Float[Array, "batch 4*hidden"], c: Float[Array, "batch hidden"], norms: LSTMNorms
) -> LSTMState:
    """Returns the state of an LSTM after a step, from its gates and its last cell.

        i, f, g, o ← LN(i), LN(f), LN(g), LN(o)     each with its own scale and bias
        c_t = σ(f) ⊙ c_{t−1} + σ(i) ⊙ tanh(g)
        h_t = σ(o) ⊙ tanh(LN(c_t))

    c_t itself is carried without normalization. Only h_t is computed from the normalized c_t.
    """
    scale, shift = norms.gate_scale.reshape(4, -1), norms.gate_bias.reshape(4, -1)
    i, f, g, o = jnp.unstack(
        layer_norm(gates.reshape(gates.shape[0], *scale.shape), scale, shift), axis=1
    )
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(layer_norm(c, norms.cell_scale, norms.cell_bias))
    return LSTMState(h, c)


def layer_norm(
    x: Float[Array, "batch *gates features"],
    scale: Float[Array, "*gates features"],
    bias: Float[Array, "*gates features"],
) -> Float[Array, "batch *gates features"]:
    """`(x − mean) / √(var + 1e-5) · scale + bias` over the features, in at least float32."""
    dtype = carry_dtype(x.dtype)
    x = x.astype(dtype)
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centred**2, axis=-1, keepdims=True)
    scale, bias = (jnp.broadcast_to(a.astype(dtype), x.shape) for a in (scale, bias))
    return centred * jax.lax.rsqrt(variance + 1e-5) * scale + bias
