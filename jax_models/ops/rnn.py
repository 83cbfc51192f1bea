"""The simple (Elman) recurrence."""

from typing import Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_models.ops.arguments import checked
from jax_models.ops.products import Product
from jax_models.ops.recurrence import Step, recurrence
from jax_models.ops.rows import ScanMasks

Nonlinearity = Literal["tanh", "relu"]


class RNNState(NamedTuple):
    """The state of an RNN: the hidden state h."""

    h: Float[Array, "*layers batch hidden"]


@checked(layers=())
def rnn(
    x: Float[Array, "batch time in"],
    state: RNNState,
    *,
    kernel_ih: Float[Array, "in hidden"],
    kernel_hh: Float[Array, "hidden hidden"],
    bias_ih: Float[Array, " hidden"] | None = None,
    bias_hh: Float[Array, " hidden"] | None = None,
    nonlinearity: Nonlinearity = "tanh",
    **masks: Unpack[ScanMasks],
) -> tuple[Float[Array, "batch time hidden"], RNNState]:
    """`h_t = φ(x_t W_ih + b_ih + h_{t−1} W_hh + b_hh)`, φ = tanh or relu.

    `masks` are `lengths`, `reset` and `reverse`, as in `ScanMasks`.
    """
    products = {"h": Product(kernel_hh, bias_hh, kernel_ih, bias_ih)}
    return recurrence(STEPS[nonlinearity], state, products, x, **masks)


def _tanh_step(state: RNNState, now: Step) -> RNNState:
    return RNNState(jnp.tanh(now.product("h", state.h)))


def _relu_step(state: RNNState, now: Step) -> RNNState:
    return RNNState(jax.nn.relu(now.product("h", state.h)))


STEPS = {"tanh": _tanh_step, "relu": _relu_step}
