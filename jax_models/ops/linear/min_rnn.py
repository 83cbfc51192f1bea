"""The minimal gated recurrences minGRU and minLSTM, whose gates depend only on the input."""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_models.checks.arguments import checked
from jax_models.ops.affine import affine
from jax_models.ops.linear import LinearRecurrenceMethod, linear_recurrence
from jax_models.ops.rows import DividedScanMasks


class MinRNNState(NamedTuple):
    """The state of a minGRU or a minLSTM: the hidden state h."""

    h: Float[Array, "*layers batch hidden"]


@checked(layers=())
def min_gru(
    x: Float[Array, "batch time in"],
    state: MinRNNState,
    *,
    kernel: Float[Array, "in 2*hidden"],
    bias: Float[Array, " 2*hidden"] | None = None,
    method: LinearRecurrenceMethod = "auto",
    **masks: Unpack[DividedScanMasks],
) -> tuple[Float[Array, "batch time hidden"], MinRNNState]:
    """Runs a minGRU over a sequence, with its gates side by side in the order z, h.

        z_t = σ(x_t W_z + b_z)
        h_t = (1 − z_t) ⊙ h_{t−1} + z_t ⊙ (x_t W_h + b_h)

    `masks` are those of `linear_recurrence`.
    """
    gate, candidate = jnp.split(affine(x, kernel, bias), 2, axis=-1)
    z = jax.nn.sigmoid(gate)
    keep = jax.nn.sigmoid(-gate)  # 1 − z would be inaccurate if z is near 1
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
    **masks: Unpack[DividedScanMasks],
) -> tuple[Float[Array, "batch time hidden"], MinRNNState]:
    """Runs a minLSTM over a sequence, with its gates side by side in the order f, i, h.

        f_t = σ(x_t W_f + b_f),   i_t = σ(x_t W_i + b_i)
        h_t = f_t / (f_t + i_t) ⊙ h_{t−1} + i_t / (f_t + i_t) ⊙ (x_t W_h + b_h)

    `masks` are those of `linear_recurrence`. The quotients of f and i are computed from
    exponentials of numbers ≤ 0, which stay accurate if both gates are tiny.
    """
    f, i, candidate = jnp.split(affine(x, kernel, bias), 3, axis=-1)
    keep, let_in = _shares(f, i)
    h, last = linear_recurrence(keep, let_in * candidate, state.h, method=method, **masks)
    return h, MinRNNState(last)


def _shares(f: Array, i: Array) -> tuple[Array, Array]:
    """Returns `σ(f)` and `σ(i)`, each divided by their sum.

    With `σ(f) = 1 / (1 + e^−f)`, the first is `(1 + e^−i) / (2 + e^−f + e^−i)`. Numerator and
    denominator are scaled by e^least, which cancels, so `least` needs no derivative.
    """
    f, i = (jnp.maximum(gate, jnp.finfo(gate.dtype).min) for gate in (f, i))  # −∞ − −∞ is NaN
    least = lax.stop_gradient(jnp.minimum(jnp.minimum(f, i), 0))
    one, of_f, of_i = jnp.exp(least), jnp.exp(least - f), jnp.exp(least - i)
    both = 2 * one + of_f + of_i
    return (one + of_i) / both, (one + of_f) / both
