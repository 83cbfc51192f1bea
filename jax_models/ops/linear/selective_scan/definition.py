"""The selective scan as its equation."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jax_models.ops.affine import einsum
from jax_models.ops.rows import steps_first

Results = tuple[Float[Array, "batch time features"], Float[Array, "batch state features"]]
"""All y and the last h."""


class Steps(NamedTuple):
    """The arrays of `ops.selective_scan` that have a value for each step."""

    u: Float[Array, "batch time features"]
    dt: Float[Array, "batch time features"]
    B: Float[Array, "batch time state"]
    C: Float[Array, "batch time state"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SelectiveScan:
    """A call of `ops.selective_scan`. All arrays have the same dtype, and the features come last.

    Steps in the padding are zero, which leaves h unchanged.
    """

    steps: Steps
    A: Float[Array, "state features"]
    h: Float[Array, "batch state features"]
    """The state before the first step."""
    reset: Bool[Array, "batch time"] | None = None


@jax.jit  # else eager calls would compile the scan each time
def scan(call: SelectiveScan) -> Results:
    """Computes `h_t = exp(Δ_t A) ⊙ h_{t−1} + Δ_t u_t B_tᵀ` and `y_t = h_t C_t` for each t."""

    def step(h, now):
        (u, dt, B, C), restart = now
        h = kept(call.A, dt) * restarted(h, restart) + outer(B, dt * u)
        return h, read(h, C)

    last, y = lax.scan(step, call.h, steps_first((call.steps, call.reset)))
    return jnp.swapaxes(y, 0, 1), last


def restarted(h: Array, restart: Array | None) -> Array:
    """Returns h with zeros in the rows that restart."""
    return h if restart is None else jnp.where(restart[:, None, None], 0, h)


def kept(
    A: Float[Array, "state features"], dt: Float[Array, "batch features"]
) -> Float[Array, "batch state features"]:
    """`exp(Δ A)`, the part of the state that a step keeps."""
    return jnp.exp(dt[:, None] * A[None])


def outer(
    B: Float[Array, "batch state"], v: Float[Array, "batch features"]
) -> Float[Array, "batch state features"]:
    """`v Bᵀ` for each row."""
    return B[:, :, None] * v[:, None]


def read(
    h: Float[Array, "batch state features"], C: Float[Array, "batch state"]
) -> Float[Array, "batch features"]:
    """`h C` for each row."""
    return einsum("bnd,bn->bd", h, C)
