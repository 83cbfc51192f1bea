"""The long short-term memory recurrence."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jax_models.ops.checks import checked, wrong_shape
from jax_models.ops.recurrence import Product, Step, recurrence


class LSTMState(NamedTuple):
    """What an LSTM carries: the output h, projected where there is a projection, and the cell c."""

    h: Float[Array, "*layers batch out"]
    c: Float[Array, "*layers batch hidden"]


@checked(layers=())
def lstm(
    x: Float[Array, "batch time in"],
    state: LSTMState,
    *,
    kernel_ih: Float[Array, "in 4*hidden"],
    kernel_hh: Float[Array, "out 4*hidden"],
    bias_ih: Float[Array, " 4*hidden"] | None = None,
    bias_hh: Float[Array, " 4*hidden"] | None = None,
    kernel_hr: Float[Array, "hidden out"] | None = None,
    bias_hr: Float[Array, " out"] | None = None,
    peephole: Float[Array, " 3*hidden"] | None = None,
    **options,
) -> tuple[Float[Array, "batch time out"], LSTMState]:
    """The LSTM of torch, its gates side by side in the order i, f, g, o.

        i, f, g, o = x_t W_ih + b_ih + h_{t−1} W_hh + b_hh
        c_t = σ(f) ⊙ c_{t−1} + σ(i) ⊙ tanh(g)
        h_t = σ(o) ⊙ tanh(c_t)                  then, with a projection, h_t W_hr + b_hr

    A `peephole` has p_i, p_f and p_o side by side: p_i ⊙ c_{t−1} is added to i, p_f ⊙ c_{t−1} to f,
    and p_o ⊙ c_t to o.

    `options` are `lengths`, `reset`, `reverse` and `method`, as in `recurrence`.
    """
    products = {"gates": Product(kernel_hh, bias_hh, kernel_ih, bias_ih)}
    options["params"] = peephole
    if kernel_hr is not None:
        products["output"] = Product(kernel_hr, bias_hr)
        return recurrence(_projected_step, state, products, x, **options)
    hidden = state.c.shape[1]
    if bias_hr is not None:
        raise ValueError("bias_hr: expected None where there is no kernel_hr, got an array")
    if kernel_hh.shape[0] != hidden:
        raise wrong_shape("kernel_hh", (hidden, 4 * hidden), kernel_hh.shape)
    return recurrence(_step, state, products, x, **options)


def _step(state: LSTMState, now: Step) -> LSTMState:
    z = now.product("gates", state.h)
    if now.params is None:
        return LSTMState(*_cell(now.axis, z, state.c))
    return _peephole_cell(now, z, state.c)


def _peephole_cell(now: Step, z: Array, c: Array) -> LSTMState:
    of_gates = jnp.split(now.params.astype(c.dtype), 3)
    p_i, p_f, p_o = (jnp.broadcast_to(jnp.expand_dims(p, 1 - now.axis), c.shape) for p in of_gates)
    i, f, g, o = now.split(z, 4)
    i, f = jax.nn.sigmoid(i + p_i * c), jax.nn.sigmoid(f + p_f * c)
    c = f * c + i * jnp.tanh(g)
    return LSTMState(jax.nn.sigmoid(o + p_o * c) * jnp.tanh(c), c)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _cell(axis: int, z, c):
    """The next h and c, from the sums z of the four gates, side by side on `axis`."""
    _, _, (i, f, g, o) = _gates(axis, z)
    c = f * c + i * g
    return o * jnp.tanh(c), c


@_cell.defjvp
def _cell_jvp(axis: int, primals, tangents):
    """Each gate has one derivative to pass on: of c by i's, f's and g's sum, of h by o's.

    So the transpose is one product with all four, which XLA's CPU backend makes of whole vectors.
    """
    (z, c), (d_z, d_c) = primals, tangents
    t, scale, (i, f, g, o) = _gates(axis, z)
    next_c = f * c + i * g
    u = jnp.tanh(next_c)
    factors = jnp.concatenate([g, c, i, u], axis)
    d_i, d_f, d_g, d_o = jnp.split(factors * (1 - t * t) * scale * scale * d_z, 4, axis)
    d_c = f * d_c + d_i + d_f + d_g
    return (o * u, next_c), (o * (1 - u * u) * d_c + d_o, d_c)


def _gates(axis: int, z):
    """`t = tanh(scale ⊙ z)`, `scale`, and i, f, g, o, of which σ(z) = ½ + ½ tanh(½ z).

    One tanh of all four is one loop over whole vectors, twice as fast as four functions.
    """
    scale = np.repeat(np.asarray([0.5, 0.5, 1, 0.5], z.dtype), z.shape[axis] // 4)
    scale = jnp.broadcast_to(jnp.expand_dims(scale, 1 - axis), z.shape)
    t = jnp.tanh(scale * z)
    i, f, g, o = jnp.split(t, 4, axis)
    return t, scale, (0.5 + 0.5 * i, 0.5 + 0.5 * f, g, 0.5 + 0.5 * o)


def _projected_step(state: LSTMState, now: Step) -> LSTMState:
    h, c = _step(state, now)
    return LSTMState(now.product("output", h), c)
