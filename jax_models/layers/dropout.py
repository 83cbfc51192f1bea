"""Dropout with masks that do not depend on how rows and time are divided over devices."""

import warnings

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jax_models.checks.values import checked_rate


class TrainingView(nnx.Module):
    """A module that behaves differently in training, with the options that `nnx.view` sets."""

    deterministic: bool
    batch_axis: str | None = None
    time_axis: str | None = None

    def set_view(
        self,
        deterministic: bool | None = None,
        batch_axis: str | None = None,
        time_axis: str | None = None,
    ) -> None:
        """Sets these options in a view: `nnx.view` calls this method.

        Args:
            deterministic: if true, the module runs as in inference.
            batch_axis: the mesh axis over which rows are divided.
            time_axis: the mesh axis over which time is divided.

        """
        self.deterministic = self.deterministic if deterministic is None else deterministic
        self.batch_axis = batch_axis or self.batch_axis
        self.time_axis = time_axis or self.time_axis


class Dropout(TrainingView, nnx.Dropout):
    """Zeroes each element with probability `rate`, and divides the others by `1 − rate`.

        >>> dropout = Dropout(0.1, rngs=nnx.Rngs(0))
        >>> y = dropout(jnp.ones((8, 100, 64)))

    The mask of a step depends only on the key, the step's row and its place in the row. Inside a
    `jax.shard_map`, call `nnx.view(model, batch_axis="data", time_axis="sequence")` to name the
    mesh axes over which rows and time are divided. Each device then draws its part of the mask that
    a single device would draw. At rate 0 there is no random state.

    Raises:
        ValueError: the rate is not in [0, 1).

    """

    def __init__(self, rate: float, *, rngs: nnx.Rngs):
        super().__init__(checked_rate("dropout_rate", rate), rngs=rngs if rate else None)

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Float[Array, "batch time *features"]
    ) -> Float[Array, "batch time *features"]:
        """Drops elements of x, unless the module is `deterministic`."""
        if self.deterministic or self.rngs is None:
            return x
        # Each row and step has its own key, made from its index among all devices, so that the mask
        # does not depend on how an array is divided.
        batch_size, time, *features = x.shape
        key = self.rngs()
        rows = global_indices(batch_size, self.batch_axis)
        steps = global_indices(time, self.time_axis)

        def mask(row, step):
            step_key = jax.random.fold_in(jax.random.fold_in(key, row), step)
            return jax.random.bernoulli(step_key, 1 - self.rate, features)

        kept = jax.vmap(jax.vmap(mask, (None, 0)), (0, None))(rows, steps)
        return jnp.where(kept, x / (1 - self.rate), 0)


def dropout_between(num_layers: int, rate: float, *, rngs: nnx.Rngs) -> Dropout:
    """Returns the dropout module for the inputs of every layer of a stack but the first."""
    dropout = Dropout(rate, rngs=rngs)
    if rate and num_layers == 1:
        warnings.warn(
            f"dropout_rate: {rate} has no effect with num_layers=1, because it drops the inputs of "
            "every layer but the first",
            stacklevel=3,
        )
    return dropout


def global_indices(count: int, axis: str | None) -> Int[Array, " count"]:
    """The indices of this device's rows, or steps, among those of all devices."""
    first = 0 if axis is None else lax.axis_index(axis) * count
    return first + jnp.arange(count, dtype=jnp.int32)
