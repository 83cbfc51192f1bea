"""Padded and packed rows: which steps are active, and where documents begin and end.

`lengths` and `reset` become masks here and nowhere else.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from jax_models.ops.checks import checked
from jax_models.ops.time_axis import states_between


class Segments(NamedTuple):
    """Masks of a batch of rows; None where all steps are active, or none restarts."""

    active: Bool[Array, "batch time"] | None
    """The steps that are no padding."""
    restart: Bool[Array, "batch time"] | None
    """The steps before which the state is zeroed, in the direction of the scan."""


def segments(
    time: int,
    lengths: Int[Array, " batch"] | None,
    reset: Bool[Array, "batch time"] | None,
    *,
    reverse: bool = False,
) -> Segments:
    """The masks of rows of `time` steps."""
    active, restart = active_steps(time, lengths), reset
    if active is not None and restart is not None:
        restart = restart & active
    if restart is not None and reverse:
        restart = document_ends(restart)
    return Segments(active, restart)


def active_steps(
    time: int, lengths: Int[Array, " batch"] | None
) -> Bool[Array, "batch time"] | None:
    """The steps t < lengths[b] of each row b."""
    if lengths is None:
        return None
    return jnp.arange(time, dtype=lengths.dtype)[None, :] < lengths[:, None]


def mask_padding(
    x: Shaped[Array, "batch time ..."], lengths: Int[Array, " batch"] | None
) -> Shaped[Array, "batch time ..."]:
    """The sequences, zero from each row's length on."""
    active = active_steps(x.shape[1], lengths)
    if active is None:
        return x
    active = active.reshape(active.shape + (1,) * (x.ndim - 2))
    return jnp.where(active, x, jnp.zeros_like(x))


def reverse_time(
    x: Shaped[Array, "batch time ..."], lengths: Int[Array, " batch"] | None
) -> Shaped[Array, "batch time ..."]:
    """Each row's first `lengths` steps in reverse order; the padding stays where it is."""
    if lengths is None:
        return jnp.flip(x, axis=1)
    t = jnp.arange(x.shape[1], dtype=lengths.dtype)[None, :]
    index = jnp.where(t < lengths[:, None], lengths[:, None] - 1 - t, t)
    return jnp.take_along_axis(x, index.reshape(index.shape + (1,) * (x.ndim - 2)), axis=1)


@checked()
def document_ends(reset: Bool[Array, "batch time"]) -> Bool[Array, "batch time"]:
    """The last step of each packed document except the row's last, from their first steps."""
    return jnp.pad(reset, ((0, 0), (0, 1)))[:, 1:]


def positions_after(
    start: Int[Array, " batch"], time: int, reset: Bool[Array, "batch time"] | None
) -> Int[Array, "batch time"]:
    """Each step's position, counted on from `start`, and from 0 at each `reset`."""
    steps = jnp.arange(time, dtype=start.dtype)[None, :]
    positions = start[:, None] + steps
    if reset is None:
        return positions
    last_reset = jax.lax.cummax(jnp.where(reset, steps, -1), axis=1)
    return jnp.where(last_reset >= 0, steps - last_reset, positions)


def at_end(
    start: Int[Array, " batch"],
    values: Int[Array, "batch time"],
    lengths: Int[Array, " batch"] | None,
) -> Int[Array, " batch"]:
    """Each row's value at its last step; `start` for a row without a step."""
    ends = jnp.full(start.shape, values.shape[1], jnp.int32) if lengths is None else lengths
    values = jnp.concatenate([start[:, None], values], axis=1)
    return jnp.take_along_axis(values, ends[:, None], axis=1)[:, 0]


def positions_and_end(
    start: Int[Array, " batch"],
    time: int,
    lengths: Int[Array, " batch"] | None,
    reset: Bool[Array, "batch time"] | None,
    time_axis: str | None = None,
) -> tuple[Int[Array, "batch time"], Int[Array, " batch"]]:
    """Each step's position, and that of the step after each row's last.

    With a `time_axis`, over whose devices time is divided, `start` and the end are those of all
    devices' steps.
    """
    if time_axis is None:
        positions = positions_after(start, time, reset)
        return positions, at_end(start, positions + 1, lengths)
    count = positions_after(jnp.zeros_like(start), time, reset)[:, -1] + 1
    restarts = jnp.zeros(count.shape, bool) if reset is None else reset.any(axis=1)

    def after(steps, position):
        restarts, count = steps
        return jnp.where(restarts, 0, position) + count

    before, end = states_between(after, (restarts, count), start, time_axis)
    return positions_after(before, time, reset), end
