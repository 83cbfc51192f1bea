"""Checks of the arguments with which a layer or a model is called."""

__all__ = ["state_batch_axes"]

from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jax_models.checks.values import (
    as_array,
    checked_array,
    described,
    lengths_within,
    wrong_shape,
)

State = TypeVar("State")
"""A pytree of arrays: a NamedTuple with named fields, which the layer's `init_state` defines."""


class HasState(Protocol):
    """A layer or a model that carries a state."""

    def init_state(self, batch_size: int) -> Any:
        """The state before the first step."""
        ...


def state_batch_axes(layer: HasState) -> Any:
    """The batch axis of each array of a layer's state, as `vmap` expects in `in_axes`.

    >>> state_batch_axes(LSTM(64, 256, rngs=nnx.Rngs(0)))
    LSTMState(h=1, c=1)
    """
    if isinstance(layer, type) or not hasattr(layer, "init_state"):
        raise TypeError(
            f"layer: expected a layer or a model with init_state, got {described(layer)}"
        )
    one = jax.eval_shape(lambda: layer.init_state(1))
    two = jax.eval_shape(lambda: layer.init_state(2))
    return jax.tree.map(
        lambda a, b: next(i for i in range(a.ndim) if a.shape[i] != b.shape[i]), one, two
    )


def checked_features(x, in_features: int, *, ranks: tuple[int, int], time_major: bool) -> Array:
    """Returns x as a floating array of one of the `ranks` (unbatched, batched), or refuses it."""
    x = checked_array("x", as_array("x", x), Float)
    if x.ndim not in ranks or x.shape[-1] != in_features:
        steps = {3: "(time, batch, {})" if time_major else "(batch, time, {})", 2: "(batch, {})"}
        alone = {3: "(time, {})", 2: "({},)"}
        expected = f"{steps[ranks[1]]} or {alone[ranks[1]]} unbatched"
        raise ValueError(
            f"x: expected shape {expected.replace('{}', str(in_features))}, got {x.shape}"
        )
    return x


def checked_lengths(
    lengths, batch_shape: tuple[int, ...], time: int
) -> tuple[Int[Array, " batch"] | None, Bool[Array, " batch"] | None]:
    """Returns the results of `lengths_within`, or None and None if `lengths` is None."""
    if lengths is None:
        return None, None
    return lengths_within(_checked_counts("lengths", lengths, batch_shape), time)


def checked_spans(
    lengths, starts, batch_shape: tuple[int, ...], time: int
) -> tuple[Int[Array, " batch"] | None, Int[Array, " batch"] | None, Bool[Array, " batch"] | None]:
    """Returns the number of real steps of each row, the number of steps before them, and a mask.

    Row b has the real steps starts[b] ≤ t < lengths[b]. The mask is that of `lengths_within`.
    """
    ends, outside = checked_lengths(lengths, batch_shape, time)
    if starts is None:
        return ends, None, outside
    starts = _checked_counts("starts", starts, batch_shape)
    starts, early = lengths_within(starts, time if ends is None else ends, "starts")
    if outside is None or early is None:  # unknown lengths also make it unknown which starts fit
        outside = early
    else:
        outside |= early
    return (time if ends is None else ends) - starts, starts, outside


def _checked_counts(name: str, counts, shape: tuple[int, ...]) -> Any:
    """Returns numbers of steps (batch,), which may be a single one if unbatched."""
    if not isinstance(counts, jax.Array):
        counts = as_array(name, counts, np.asarray)
    return checked_array(name, counts, Int, shape).reshape(-1)


def checked_reset(
    reset, shape: tuple[int, ...], *, time_major: bool = False
) -> Bool[Array, "batch time"] | None:
    """Returns `reset` as booleans (batch, time), or raises an error.

    `shape` is (batch, time) or (time,). With `time_major`, the `reset` of a batch is (time, batch).
    """
    if reset is None:
        return None
    reset = checked_array("reset", as_array("reset", reset), Bool)
    time_major = time_major and len(shape) == 2
    expected = shape[::-1] if time_major else shape
    if reset.shape != expected:
        if time_major and reset.shape == shape:
            raise ValueError(
                f"reset: expected shape (time, batch) = {expected}, the layout of x with "
                f"time_major=True, got (batch, time) = {shape}: transpose it"
            )
        raise wrong_shape("reset", expected, reset.shape)
    return jnp.atleast_2d(reset.T if time_major else reset)


def checked_step_reset(reset, shape: tuple[int, ...], time_axis: int) -> Array | None:
    """Returns the `reset` of a single step with a time axis of size 1, or raises an error."""
    if reset is None:
        return None
    reset = checked_array("reset", as_array("reset", reset), Bool, shape)
    return jnp.expand_dims(reset, time_axis)


def checked_state(layer: HasState, state: State, batch_size: int, *, batched: bool = True) -> State:
    """Returns the state of a layer or a model as arrays with a batch axis, or raises an error."""
    expected = jax.eval_shape(lambda: layer.init_state(batch_size))
    if not batched and jax.tree.structure(state) == jax.tree.structure(expected):
        state = jax.tree.map(jnp.expand_dims, state, state_batch_axes(layer))
    _check_structure("state", state, expected)
    state = jax.tree_util.tree_map_with_path(
        lambda path, leaf: as_array(f"state{jax.tree_util.keystr(path)}", leaf), state
    )
    leaves = jax.tree_util.tree_leaves_with_path(state)
    for (path, leaf), like in zip(leaves, jax.tree.leaves(expected), strict=True):
        name = f"state{jax.tree_util.keystr(path)}"
        if leaf.shape != like.shape:
            raise wrong_shape(name, like.shape, leaf.shape)
        kinds = (jnp.floating, jnp.integer, jnp.bool_)
        if any(jnp.issubdtype(leaf.dtype, k) != jnp.issubdtype(like.dtype, k) for k in kinds):
            raise TypeError(f"{name}: expected a dtype like {like.dtype}, got {leaf.dtype}")
    return state


def _check_structure(name: str, state: Any, expected: Any) -> None:
    """Raises an error that names the innermost field whose structure is wrong."""
    if jax.tree.structure(state) == jax.tree.structure(expected):
        return
    if type(state) is type(expected) and hasattr(expected, "_fields"):
        for field, given, like in zip(expected._fields, state, expected, strict=True):
            _check_structure(f"{name}.{field}", given, like)
    array = described(expected).replace("a ShapeDtypeStruct", "an array")
    raise TypeError(f"{name}: expected {array}, got {described(state)}")
