"""The minimal gated recurrences minGRU and minLSTM, whose gates see the input alone."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_models.ops.affine import affine
from jax_models.ops.checks import checked
from jax_models.ops.linear_recurrence import LinearRecurrenceMethod, linear_recurrence


class MinRNNState(NamedTuple):
    """What a minGRU or a minLSTM carries: the hidden state h."""

    h: Float[Array, "*layers batch hidden"]


@checked(layers=())
def min_gru(
    x: Float[Array, "batch time in"],
    state: MinRNNState,
    *,
    kernel: Float[Array, "in 2*hidden"],
    bias: Float[Array, " 2*hidden"] | None = None,
    method: LinearRecurrenceMethod = "auto",
    **masks,
) -> tuple[Float[Array, "batch time hidden"], MinRNNState]:
    """The minGRU, its gates side by side in the order z, h.

        z_t = σ(x_t W_z + b_z)
        h_t = (1 − z_t) ⊙ h_{t−1} + z_t ⊙ (x_t W_h + b_h)

    `masks` are `lengths`, `reset` and `reverse`, as in `linear_recurrence`.
    """
    gate, candidate = jnp.split(affine(x, kernel, bias), 2, axis=-1)
    z = jax.nn.sigmoid(gate)
    keep = jax.nn.sigmoid(-gate)  # 1 − z would lose its digits where z is near 1
    h, last = linear_recurrence(keep, z * candidate, state.h, method=method, **masks)
    return h, MinRNNState(last)


@checked(layers=())
def min_lstm(
    x: Float[Array, "batch time in"],
    state: MinRNNState,
    *,
    kernel: Float[Array, "in 3*hidden"],
    bias: Float[Array, " 3*hidden"] | None = None,
    method: LinearRecurrenceMethod = "auto",
    **masks,
) -> tuple[Float[Array, "batch time hidden"], MinRNNState]:
    """The minLSTM, its gates side by side in the order f, i, h.

        f_t = σ(x_t W_f + b_f),   i_t = σ(x_t W_i + b_i)
        h_t = f_t / (f_t + i_t) ⊙ h_{t−1} + i_t / (f_t + i_t) ⊙ (x_t W_h + b_h)

    `masks` are `lengths`, `reset` and `reverse`, as in `linear_recurrence`. The shares of f and i
    are computed as `σ(log f − log i)` and `σ(log i − log f)`, which stay right where both are tiny.
    """
    f, i, candidate = jnp.split(affine(x, kernel, bias), 3, axis=-1)
    difference = jax.nn.log_sigmoid(f) - jax.nn.log_sigmoid(i)
    keep, let_in = jax.nn.sigmoid(difference), jax.nn.sigmoid(-difference)
    h, last = linear_recurrence(keep, let_in * candidate, state.h, method=method, **masks)
    return h, MinRNNState(last)
