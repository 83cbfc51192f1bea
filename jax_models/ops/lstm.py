"""The long short-term memory recurrence."""

from typing import NamedTuple, Unpack

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_models.ops.arguments import checked
from jax_models.ops.checks import wrong_shape
from jax_models.ops.products import Product
from jax_models.ops.recurrence import Step, recurrence, sigmoid
from jax_models.ops.rows import ScanMasks


class LSTMState(NamedTuple):
    """The state of an LSTM: the output h, after the projection if there is one, and the cell c."""

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
    **masks: Unpack[ScanMasks],
) -> tuple[Float[Array, "batch time out"], LSTMState]:
    """Runs an LSTM, with its gates side by side in the order i, f, g, o, as in torch.

        i, f, g, o = x_t W_ih + b_ih + h_{t−1} W_hh + b_hh
        c_t = σ(f) ⊙ c_{t−1} + σ(i) ⊙ tanh(g)
        h_t = σ(o) ⊙ tanh(c_t)

    With a `kernel_hr`, the output is the projection (σ(o) ⊙ tanh(c_t)) W_hr + b_hr instead.

    A `peephole` holds p_i, p_f and p_o side by side. Then p_i ⊙ c_{t−1} is added to i,
    p_f ⊙ c_{t−1} to f, and p_o ⊙ c_t to o.

    `masks` are `lengths`, `reset` and `reverse`, as in `ScanMasks`.
    """
    products = Product(kernel_hh, bias_hh, kernel_ih, bias_ih).gates("ifgo")
    if kernel_hr is not None:
        step, products["output"] = _projected_step, Product(kernel_hr, bias_hr)
    elif bias_hr is not None:
        raise ValueError("bias_hr: expected None where there is no kernel_hr, got an array")
    elif kernel_hh.shape[0] != (hidden := state.c.shape[1]):
        raise wrong_shape("kernel_hh", (hidden, 4 * hidden), kernel_hh.shape)
    else:
        step = lstm_step
    return recurrence(step, state, products, x, params=peephole, **masks)


def lstm_step(state: LSTMState, now: Step) -> LSTMState:
    i, f, g, o = now.products("ifgo", state.h)
    c = state.c
    if now.params is None:
        c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(g)
        return LSTMState(sigmoid(o) * jnp.tanh(c), c)
    p_i, p_f, p_o = (jnp.broadcast_to(p, c.shape) for p in jnp.split(now.params.astype(c.dtype), 3))
    c = sigmoid(f + p_f * c) * c + sigmoid(i + p_i * c) * jnp.tanh(g)
    return LSTMState(sigmoid(o + p_o * c) * jnp.tanh(c), c)


def _projected_step(state: LSTMState, now: Step) -> LSTMState:
    h, c = lstm_step(state, now)
    return LSTMState(now.product("output", h), c)
