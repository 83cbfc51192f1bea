"""The gated recurrent unit's recurrence."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_models.ops.checks import checked
from jax_models.ops.recurrence import Pair, Product, Step, recurrence


class GRUState(NamedTuple):
    """What a GRU carries: the hidden state h."""

    h: Float[Array, "*layers batch hidden"]


@checked(layers=())
def gru(
    x: Float[Array, "batch time in"],
    state: GRUState,
    *,
    kernel_ih: Float[Array, "in 3*hidden"],
    kernel_hh: Float[Array, "hidden 3*hidden"],
    bias_ih: Float[Array, " 3*hidden"] | None = None,
    bias_hh: Float[Array, " 3*hidden"] | None = None,
    reset_after: bool = True,
    **options,
) -> tuple[Float[Array, "batch time hidden"], GRUState]:
    """The GRU of torch, its gates side by side in the order r, z, n.

        r = σ(x_t W_ir + b_ir + h_{t−1} W_hr + b_hr)
        z = σ(x_t W_iz + b_iz + h_{t−1} W_hz + b_hz)
        n = tanh(x_t W_in + b_in + r ⊙ (h_{t−1} W_hn + b_hn))
        h_t = (1 − z) ⊙ n + z ⊙ h_{t−1}

    b_hn stands inside the product with r, so it cannot be merged into b_in. Without `reset_after`,
    r stands before the product, as in the paper:

        n = tanh(x_t W_in + b_in + (r ⊙ h_{t−1}) W_hn + b_hn)

    `options` are `lengths`, `reset`, `reverse` and `method`, as in `recurrence`.
    """
    weights = kernel_hh, bias_hh, kernel_ih, bias_ih
    r, z, n = zip(*(_gates(a) for a in weights), strict=True)
    step, of_n = (_step, Pair(*n)) if reset_after else (_step_reset_before, Product(*n))
    return recurrence(step, state, {"r": Product(*r), "z": Product(*z), "n": of_n}, x, **options)


def _step(state: GRUState, now: Step) -> GRUState:
    [h] = state
    r, z = _r_and_z(now, h)
    n_x, n_h = now.product("n", h)
    n = jnp.tanh(n_x + r * n_h)
    return GRUState((1 - z) * n + z * h)


def _step_reset_before(state: GRUState, now: Step) -> GRUState:
    [h] = state
    r, z = _r_and_z(now, h)
    n = jnp.tanh(now.product("n", r * h))
    return GRUState((1 - z) * n + z * h)


def _r_and_z(now: Step, h: Array) -> list[Array]:
    return [0.5 + 0.5 * jnp.tanh(0.5 * now.product(gate, h)) for gate in "rz"]  # σ, by XLA's tanh


def _gates(weight: Array | None) -> Sequence[Array | None]:
    """A weight's parts, which XLA reads faster as arrays of their own than side by side."""
    return [None] * 3 if weight is None else jnp.split(weight, 3, axis=-1)
