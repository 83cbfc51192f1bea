"""Time divided over the devices along a mesh axis, inside a `jax.shard_map`.

Each device has the steps that follow those of the device before it. The states that a caller passes
and receives refer to the steps of all devices together, and are the same on every device.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_models.ops.shard_map_axes import match_varying_axes

State = TypeVar("State")


def states_between(
    advance: Callable[[Any, State], State],
    steps: Any,
    start: State,
    time_axis: str,
    *,
    reverse: bool = False,
) -> tuple[State, State]:
    """Returns the state before this device's steps, and the state after the steps of all devices.

    `advance(steps, state)` returns the state after the steps of one device. With `reverse`, the
    last device comes first.
    """
    of_all = lax.all_gather(steps, time_axis)

    def one_device(state, steps):
        return advance(steps, state), state

    start, of_all = match_varying_axes((start, of_all))
    end, before = lax.scan(one_device, start, of_all, reverse=reverse)
    return jax.tree.map(lambda x: x[lax.axis_index(time_axis)], before), end


def from_device_before(x: Array, first: Array, time_axis: str) -> Array:
    """Returns the x of the device before this one, or `first` on the first device."""
    size = lax.axis_size(time_axis)
    x = lax.ppermute(x, time_axis, [(i, i + 1) for i in range(size - 1)])
    return jnp.where(lax.axis_index(time_axis) == 0, first, x)


def from_device_after(x: Array, last: Array, time_axis: str) -> Array:
    """Returns the x of the device after this one, or `last` on the last device."""
    size = lax.axis_size(time_axis)
    x = lax.ppermute(x, time_axis, [(i + 1, i) for i in range(size - 1)])
    return jnp.where(lax.axis_index(time_axis) == size - 1, last, x)
