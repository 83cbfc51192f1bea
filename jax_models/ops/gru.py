"""The gated recurrent unit's recurrence."""

from typing import NamedTuple, Unpack

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_models.ops.arguments import checked
from jax_models.ops.products import Pair, Product
from jax_models.ops.recurrence import Step, recurrence, sigmoid
from jax_models.ops.rows import ScanMasks


class GRUState(NamedTuple):
    """The state of a GRU: the hidden state h."""

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
    **masks: Unpack[ScanMasks],
) -> tuple[Float[Array, "batch time hidden"], GRUState]:
    """Runs a GRU over a sequence, with its gates side by side in the order r, z, n, as in torch.

        r = σ(x_t W_ir + b_ir + h_{t−1} W_hr + b_hr)
        z = σ(x_t W_iz + b_iz + h_{t−1} W_hz + b_hz)
        n = tanh(x_t W_in + b_in + r ⊙ (h_{t−1} W_hn + b_hn))
        h_t = (1 − z) ⊙ n + z ⊙ h_{t−1}

    Because r multiplies b_hn, the two biases of n cannot be merged. Without `reset_after`, r
    multiplies h_{t−1} before the product with W_hn, as in the paper:

        n = tanh(x_t W_in + b_in + (r ⊙ h_{t−1}) W_hn + b_hn)

    `masks` are `lengths`, `reset` and `reverse`, as in `ScanMasks`.
    """
    products = Product(kernel_hh, bias_hh, kernel_ih, bias_ih).gates("rzn")
    if not reset_after:
        step = _step_reset_before
    else:
        step, products["n"] = gru_step, Pair(*products["n"])
    return recurrence(step, state, products, x, **masks)


def gru_step(state: GRUState, now: Step) -> GRUState:
    [h] = state
    r, z, (n_x, n_h) = now.products("rzn", h)
    r, z = sigmoid(r), sigmoid(z)
    n = jnp.tanh(n_x + r * n_h)
    return GRUState((1 - z) * n + z * h)


def _step_reset_before(state: GRUState, now: Step) -> GRUState:
    [h] = state
    r, z = map(sigmoid, now.products("rz", h))
    n = jnp.tanh(now.product("n", r * h))
    return GRUState((1 - z) * n + z * h)
