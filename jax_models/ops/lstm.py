"""The long short-term memory recurrence."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_models.ops.checks import checked
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
    **options,
) -> tuple[Float[Array, "batch time out"], LSTMState]:
    """The LSTM of torch, its gates side by side in the order i, f, g, o.

        i, f, g, o = x_t W_ih + b_ih + h_{t−1} W_hh + b_hh
        c_t = σ(f) ⊙ c_{t−1} + σ(i) ⊙ tanh(g)
        h_t = σ(o) ⊙ tanh(c_t)                  then, with a projection, h_t W_hr + b_hr

    `options` are `lengths`, `reset`, `reverse` and `method`, as in `recurrence`.
    """
    products = {"gates": Product(kernel_hh, bias_hh, kernel_ih, bias_ih)}
    if kernel_hr is not None:
        products["output"] = Product(kernel_hr, bias_hr)
    step = _step if kernel_hr is None else _projected_step
    return recurrence(step, state, products, x, **options)


def _step(state: LSTMState, now: Step) -> LSTMState:
    i, f, g, o = now.split(now.product("gates", state.h), 4)
    c = jax.nn.sigmoid(f) * state.c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return LSTMState(jax.nn.sigmoid(o) * jnp.tanh(c), c)


def _projected_step(state: LSTMState, now: Step) -> LSTMState:
    h, c = _step(state, now)
    return LSTMState(now.product("output", h), c)
