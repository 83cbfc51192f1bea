"""A recurrence over padded, packed and reversed sequences."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

State = TypeVar("State")


def masked_scan(
    step: Callable[[State, Float[Array, "batch in"]], tuple[State, Float[Array, "batch out"]]],
    state: State,
    xs: Float[Array, "batch time in"],
    *,
    lengths: Int[Array, " batch"] | None = None,
    reset: Bool[Array, "batch time"] | None = None,
    reverse: bool = False,
) -> tuple[Float[Array, "batch time out"], State]:
    """`state, y_t = step(state, x_t)` for t = 0 … T−1, or T−1 … 0 with `reverse`.

    Args:
        step: the cell; its state is a pytree of arrays (batch, features).
        state: the state before the first step.
        xs: the inputs of every step.
        lengths: row b takes only the steps t < lengths[b]; the others leave its state alone.
        reset: the first steps of packed documents, where the state restarts from zero. With
            `reverse` it restarts where the scan *enters* a document, at the document's last step.
        reverse: run from the last step to the first.

    Returns:
        The outputs of every step (those beyond `lengths` carry no meaning), and the last state.

    """
    active, reset = step_masks(xs.shape[1], lengths, reset, reverse=reverse)

    def masked_step(state, inputs):
        x, active, reset = inputs
        if reset is not None:
            state = jax.tree.map(lambda s: jnp.where(reset[:, None], 0, s), state)
        new_state, y = step(state, x)
        if active is not None:
            new_state = jax.tree.map(
                lambda new, old: jnp.where(active[:, None], new, old), new_state, state
            )
        return new_state, y

    inputs = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), (xs, active, reset))
    state, ys = jax.lax.scan(masked_step, state, inputs, reverse=reverse)
    return jnp.swapaxes(ys, 0, 1), state


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


def document_ends(reset: Bool[Array, "batch time"]) -> Bool[Array, "batch time"]:
    """The last steps of packed documents (but the row's last), from their first steps."""
    return jnp.pad(reset[:, 1:], ((0, 0), (0, 1)))
