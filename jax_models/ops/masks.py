"""Padded, packed and reversed sequences."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jax_models.ops.checks import checked


def step_masks(
    time: int,
    lengths: Int[Array, " batch"] | None,
    reset: Bool[Array, "batch time"] | None,
    *,
    reverse: bool = False,
) -> tuple[Bool[Array, "batch time"] | None, Bool[Array, "batch time"] | None]:
    """Which steps are real, and before which the state restarts in the direction of the scan."""
    active = None
    if lengths is not None:
        active = jnp.arange(time, dtype=lengths.dtype)[None, :] < lengths[:, None]
    if reset is not None:
        if active is not None:
            reset = reset & active
        if reverse:
            reset = document_ends(reset)
    return active, reset


@checked()
def document_ends(reset: Bool[Array, "batch time"]) -> Bool[Array, "batch time"]:
    """The last steps of packed documents (but the row's last), from their first steps."""
    return jnp.pad(reset, ((0, 0), (0, 1)))[:, 1:]
