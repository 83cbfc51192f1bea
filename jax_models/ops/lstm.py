"""The long short-term memory recurrence."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_models.ops.affine import affine, joined_affine
from jax_models.ops.scan import masked_scan


class LSTMState(NamedTuple):
    """What an LSTM carries: the output h, projected where there is a projection, and the cell c."""

    h: Float[Array, "*layers batch out"]
    c: Float[Array, "*layers batch hidden"]


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
    **masks,
) -> tuple[Float[Array, "batch time out"], LSTMState]:
    """The LSTM of torch, its gates side by side in the order i, f, g, o.

        i, f, g, o = x_t W_ih + b_ih + h_{t−1} W_hh + b_hh
        c_t = σ(f) ⊙ c_{t−1} + σ(i) ⊙ tanh(g)
        h_t = σ(o) ⊙ tanh(c_t)                  then, with a projection, h_t W_hr + b_hr

    `masks` are `lengths`, `reset` and `reverse`, as in `masked_scan`.
    """
    gates = joined_affine(kernel_ih, kernel_hh, bias_ih, bias_hh)

    def step(state: LSTMState, x: Float[Array, "batch in"]):
        i, f, g, o = jnp.split(gates(x, state.h), 4, axis=-1)
        c = jax.nn.sigmoid(f) * state.c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        if kernel_hr is not None:
            h = affine(h, kernel_hr, bias_hr)
        return LSTMState(h, c), h

    return masked_scan(step, state, x, **masks)
