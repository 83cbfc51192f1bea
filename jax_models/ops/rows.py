"""The rows of a batch: which of their steps are padding, and where documents begin and end."""

import dataclasses
from functools import partial
from typing import Annotated, Any, TypedDict, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

from jax_models.checks.arguments import Combined, Default
from jax_models.ops.time_axis import from_device_after, states_between

Sequences = TypeVar("Sequences", bound=Array | None)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("lengths", "reset", "active"),
    meta_fields=("time_axis",),
)
@dataclasses.dataclass(frozen=True)
class Rows:
    """The padding and packing of the rows of a batch, and their division over devices.

    The call of a layer or an operator makes a `Rows` with `of`, and passes it on as a single
    argument. A function that receives a `Rows` assumes that all its arguments were checked.
    """

    lengths: Int[Array, " batch"] | None = None
    """The number of real steps of each row, before its padding. None: all steps are real."""
    reset: Bool[Array, "batch time"] | None = None
    """True at the real steps before which the state restarts: the first of each document."""
    active: Bool[Array, "batch time"] | None = None
    """True at the real steps, which are t < lengths[b] in row b. None: all are real."""
    time_axis: str | None = None
    """The mesh axis over which time is divided, inside a `jax.shard_map`."""

    @classmethod
    def of(
        cls,
        time: int,
        lengths: Int[Array, " batch"] | None = None,
        reset: Bool[Array, "batch time"] | None = None,
        time_axis: str | None = None,
    ) -> "Rows":
        """Makes the rows of `time` steps from arguments that have been checked.

        Raises:
            NotImplementedError: both lengths and a time axis are given.

        """
        if time_axis is not None and lengths is not None:
            raise NotImplementedError(
                f"lengths: expected None where time is divided over the axis {time_axis!r}, and a "
                "layer takes no starts"
            )
        if lengths is None:
            return cls(reset=reset, time_axis=time_axis)
        active = jnp.arange(time, dtype=lengths.dtype)[None, :] < lengths[:, None]
        return cls(lengths, None if reset is None else reset & active, active)

    def masked(self, x: Shaped[Array, "batch time ..."]) -> Shaped[Array, "batch time ..."]:
        """Returns the sequences with zeros in the padding."""
        if self.active is None:
            return x
        active = self.active.reshape(self.active.shape + (1,) * (x.ndim - 2))
        return jnp.where(active, x, jnp.zeros_like(x))

    def restarts(self, *, reverse: bool = False) -> Bool[Array, "batch time"] | None:
        """The steps before which a scan restarts. With `reverse`, the last of each document."""
        if not reverse or self.reset is None:
            return self.reset
        ends = document_ends(self.reset)
        if self.time_axis is None:
            return ends
        # The last step ends a document if the next device begins one.
        end = from_device_after(self.reset[:, :1], ends[:, -1:], self.time_axis)
        return jnp.concatenate([ends[:, :-1], end], axis=1)

    def reversed(self) -> "Rows":
        """The rows of sequences that `reverse_time` has reversed."""
        reset = self.restarts(reverse=True)
        if reset is not None:
            reset = reverse_time(reset, self.lengths)
        return dataclasses.replace(self, reset=reset)

    def positions(
        self, start: Int[Array, " batch"], time: int
    ) -> tuple[Int[Array, "batch time"], Int[Array, " batch"]]:
        """Returns each step's position, counted from `start`, and each row's position at its end.

        With a time axis, `start` and the second result refer to the steps of all devices together.
        """
        if self.time_axis is None:
            positions = positions_after(start, time, self.reset)
            return positions, at_end(start, positions + 1, self.lengths)
        count = positions_after(jnp.zeros_like(start), time, self.reset)[:, -1] + 1
        restarts = jnp.zeros(count.shape, bool) if self.reset is None else self.reset.any(axis=1)

        def after(steps, position):
            restarts, count = steps
            return jnp.where(restarts, 0, position) + count

        before, end = states_between(after, (restarts, count), start, self.time_axis)
        return positions_after(before, time, self.reset), end


class Masks(TypedDict, total=False):
    """Keyword arguments that say which steps of a row are real, and where documents begin."""

    lengths: Int[Array, " batch"] | None
    """Row b runs only the steps t < lengths[b]; later steps leave its state unchanged."""
    reset: Bool[Array, "batch time"] | None
    """True at the first step of each packed document, where the state restarts. With `reverse`,
    mark the first steps, too: the state then restarts at the last step of each document.
    """
    rows: Annotated[Rows | None, Combined(("lengths", "reset", "time_axis"), Rows.of)]
    """Lengths, reset and time axis as one value, for callers that have checked all arguments."""


class ScanMasks(Masks, total=False):
    """The masks of an operator that runs in either direction."""

    reverse: Annotated[bool, Default(False)]
    """Whether to run from the last step to the first."""


class DividedMasks(Masks, total=False):
    """The masks of an operator whose time may be divided over devices."""

    time_axis: str | None
    """The mesh axis over which time is divided, inside a `jax.shard_map`. Each device has some of
    the steps. States refer to the steps of all devices together, and are the same on every device.
    """


class DividedScanMasks(ScanMasks, DividedMasks, total=False):
    """The masks of an operator that has both options."""


def given_rows(masks: Masks) -> Rows:
    """Returns the `Rows` among the masks that `checked` passes to an operator."""
    return masks.get("rows") or Rows()


def steps_first(tree: Any) -> Any:
    """Swaps the axes of batch and time in all arrays of a tree."""
    return jax.tree.map(lambda array: jnp.swapaxes(array, 0, 1), tree)


def reverse_time(
    x: Shaped[Array, "batch time ..."], lengths: Int[Array, " batch"] | None
) -> Shaped[Array, "batch time ..."]:
    """Reverses each row's first `lengths` steps. The padding stays in place."""
    if lengths is None:
        return jnp.flip(x, axis=1)
    t = jnp.arange(x.shape[1], dtype=lengths.dtype)[None, :]
    index = jnp.where(t < lengths[:, None], lengths[:, None] - 1 - t, t)
    return jnp.take_along_axis(x, index.reshape(index.shape + (1,) * (x.ndim - 2)), axis=1)


def roll_rows(x: Sequences, steps: Int[Array, " batch"] | None, *, back: bool = False) -> Sequences:
    """Moves each row of x (batch, time, …) forward by `steps` in 0 … time, or back.

    Steps that leave at one end enter at the other. If x or `steps` is None, returns x.
    """
    if x is None or steps is None:
        return x
    time = x.shape[1]
    if back:
        index = jnp.arange(-time, 0, dtype=steps.dtype)[None, :] + steps[:, None]
    else:
        index = jnp.arange(time, dtype=steps.dtype)[None, :] - steps[:, None]
    index = index.reshape(index.shape + (1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1)  # a negative index counts from the end


def document_ends(reset: Bool[Array, "batch time"]) -> Bool[Array, "batch time"]:
    """Marks the last step of each packed document except a row's last, given the first steps."""
    return jnp.pad(reset, ((0, 0), (0, 1)))[:, 1:]


def positions_after(
    start: Int[Array, " batch"], time: int, reset: Bool[Array, "batch time"] | None
) -> Int[Array, "batch time"]:
    """Each step's position, counted from `start`, and again from 0 at each `reset`."""
    steps = jnp.arange(time, dtype=start.dtype)[None, :]
    positions = start[:, None] + steps
    if reset is None:
        return positions
    last_reset = lax.cummax(jnp.where(reset, steps, -1), axis=1)
    return jnp.where(last_reset >= 0, steps - last_reset, positions)


def at_end(
    start: Int[Array, " batch"],
    values: Int[Array, "batch time"],
    lengths: Int[Array, " batch"] | None,
) -> Int[Array, " batch"]:
    """Each row's value at its last step, or `start` for a row without steps."""
    ends = jnp.full(start.shape, values.shape[1], jnp.int32) if lengths is None else lengths
    values = jnp.concatenate([start[:, None], values], axis=1)
    return jnp.take_along_axis(values, ends[:, None], axis=1)[:, 0]
