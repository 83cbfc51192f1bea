"""The gated recurrent unit's recurrence."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_models.ops.affine import affine
from jax_models.ops.scan import masked_scan


class GRUState(NamedTuple):
    """What a GRU carries: the hidden state h."""

    h: Float[Array, "*layers batch hidden"]


def gru(
    x: Float[Array, "batch time in"],
    state: GRUState,
    *,
    kernel_ih: Float[Array, "in 3*hidden"],
    kernel_hh: Float[Array, "hidden 3*hidden"],
    bias_ih: Float[Array, " 3*hidden"] | None = None,
    bias_hh: Float[Array, " 3*hidden"] | None = None,
    **masks,
) -> tuple[Float[Array, "batch time hidden"], GRUState]:
    """The GRU of torch, its gates side by side in the order r, z, n.

        r = σ(x_t W_ir + b_ir + h_{t−1} W_hr + b_hr)
        z = σ(x_t W_iz + b_iz + h_{t−1} W_hz + b_hz)
        n = tanh(x_t W_in + b_in + r ⊙ (h_{t−1} W_hn + b_hn))
        h_t = (1 − z) ⊙ n + z ⊙ h_{t−1}

    b_hn stands inside the product with r, so it cannot be merged into b_in.
    `masks` are `lengths`, `reset` and `reverse`, as in `masked_scan`.
    """

    def step(state: GRUState, gates: Float[Array, "batch 3*hidden"]):
        input_r, input_z, input_n = jnp.split(gates, 3, axis=-1)
        hidden_r, hidden_z, hidden_n = jnp.split(affine(state.h, kernel_hh, bias_hh), 3, axis=-1)
        r = jax.nn.sigmoid(input_r + hidden_r)
        z = jax.nn.sigmoid(input_z + hidden_z)
        n = jnp.tanh(input_n + r * hidden_n)
        h = (1 - z) * n + z * state.h
        return GRUState(h), h

    return masked_scan(step, state, affine(x, kernel_ih, bias_ih), **masks)
