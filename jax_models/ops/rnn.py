"""The simple (Elman) recurrence."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_models.ops.affine import joined_affine
from jax_models.ops.scan import masked_scan

NONLINEARITIES = {"tanh": jnp.tanh, "relu": jax.nn.relu}


class RNNState(NamedTuple):
    """What an RNN carries: the hidden state h."""

    h: Float[Array, "*layers batch hidden"]


def rnn(
    x: Float[Array, "batch time in"],
    state: RNNState,
    *,
    kernel_ih: Float[Array, "in hidden"],
    kernel_hh: Float[Array, "hidden hidden"],
    bias_ih: Float[Array, " hidden"] | None = None,
    bias_hh: Float[Array, " hidden"] | None = None,
    nonlinearity: Literal["tanh", "relu"] = "tanh",
    **masks,
) -> tuple[Float[Array, "batch time hidden"], RNNState]:
    """`h_t = φ(x_t W_ih + b_ih + h_{t−1} W_hh + b_hh)`, φ = tanh or relu.

    `masks` are `lengths`, `reset` and `reverse`, as in `masked_scan`.
    """
    activation = NONLINEARITIES[nonlinearity]
    preactivation = joined_affine(kernel_ih, kernel_hh, bias_ih, bias_hh)

    def step(state: RNNState, x: Float[Array, "batch in"]):
        h = activation(preactivation(x, state.h))
        return RNNState(h), h

    return masked_scan(step, state, x, **masks)
