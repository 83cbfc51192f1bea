"""Time divided over the devices along a mesh axis, inside a `jax.shard_map`.

Each device has the steps that follow those of the device before it. States that come in and go out
are those before and after all steps, the same on every device.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from jax_models.ops.varying import alike

State = TypeVar("State")


def states_between(
    advance: Callable[[Any, State], State],
    steps: Any,
    start: State,
    time_axis: str,
    *,
    reverse: bool = False,
) -> tuple[State, State]:
    """The state before this device's steps, and the state after those of all devices.

    `advance(steps, state)` is the state after the steps of one device. With `reverse` the last
    device comes first.
    """
    of_all = lax.all_gather(steps, time_axis)

    def one_device(state, steps):
        return advance(steps, state), state

    start, of_all = alike((start, of_all))
    end, before = lax.scan(one_device, start, of_all, reverse=reverse)
    return jax.tree.map(lambda x: x[lax.axis_index(time_axis)], before), end


def of_device_before(x: Array, first: Array, time_axis: str) -> Array:
    """What the device before has as x; on the first device, `first`."""
    size = lax.axis_size(time_axis)
    x = lax.ppermute(x, time_axis, [(i, i + 1) for i in range(size - 1)])
    return jnp.where(lax.axis_index(time_axis) == 0, first, x)


def of_last_device(x: Array, time_axis: str) -> Array:
    """What the last device has as x."""
    return lax.all_gather(x, time_axis)[-1]


def all_steps(
    x: Shaped[Array, "batch features time"], time_axis: str
) -> Shaped[Array, "batch features time"]:
    """The steps of all devices."""
    return lax.all_gather(x, time_axis, axis=2, tiled=True)


def time_to_features(
    x: Shaped[Array, "batch features time"], time_axis: str
) -> Shaped[Array, "batch features time"]:
    """All steps of a part of the features, for some steps of all features."""
    return lax.all_to_all(x, time_axis, split_axis=1, concat_axis=2, tiled=True)


def features_to_time(
    x: Shaped[Array, "batch features time"], time_axis: str
) -> Shaped[Array, "batch features time"]:
    """Undo `time_to_features`."""
    return lax.all_to_all(x, time_axis, split_axis=2, concat_axis=1, tiled=True)


def features_here(
    h: Shaped[Array, "features time"], time_axis: str
) -> Shaped[Array, "features time"]:
    """The part of the features that `time_to_features` gives to this device."""
    size = h.shape[0] // lax.axis_size(time_axis)
    return lax.dynamic_slice_in_dim(h, lax.axis_index(time_axis) * size, size)
