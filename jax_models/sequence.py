"""The contract of a sequence layer: arguments, layouts, lengths and resets, once for all layers."""

__all__ = ["SequenceLayer", "state_batch_axes"]

import inspect
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jax_models.explicit_axes import with_auto_axes
from jax_models.ops import Rows, carry_dtype
from jax_models.ops.checks import (
    as_array,
    checked_array,
    checked_count,
    described,
    lengths_within,
    nan_rows,
    wrong_shape,
)
from jax_models.options import CheckedOptions, FloatingDtype
from jax_models.weights import Layouts

State = TypeVar("State")
"""A pytree of arrays: a NamedTuple with named fields, which the layer's `init_state` defines."""


class SequenceLayer(CheckedOptions, nnx.Module, Generic[State]):
    """A layer from sequences to sequences that carries a state.

        >>> layer = LSTM(64, 256, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))
        >>> y_t, state = layer.step(jnp.ones((8, 64)), state)

    `layer(x, state) -> (y, state)` runs over whole sequences, `layer.step(x_t, state)` over one
    step. The state that comes out goes back in: a sequence cut anywhere gives the outputs of the
    uncut one, and T steps equal one call.

    A subclass sets `in_features`, `time_major`, `causal` (is there a `step`?), `resettable` (can
    documents be packed?) and `divides_time` (does it heed `time_axis`?), and defines `init_state`
    and `sequence`; it sees only checked, batched, batch-major arguments. Its constructor is checked
    by its annotations (`CheckedOptions`).
    """

    in_features: int
    time_major: bool = False
    causal: bool = True
    resettable: bool = True
    divides_time: ClassVar[bool] = False
    time_axis: str | None = None
    dtype: jnp.dtype | None
    param_dtype: jnp.dtype

    noncausal_reason: ClassVar[str] = (
        "a bidirectional layer needs the whole sequence: call the layer itself, "
        "or build it with bidirectional=False"
    )
    unresettable_reason: ClassVar[str] = (
        "a long convolution cannot keep documents in a row apart: give each document a row of its "
        "own, and its `lengths`; between steps, replace a row's state with that of init_state"
    )

    def __init_subclass__(cls, **kwargs: Any):
        """Refuse a `sequence` of earlier versions, which took `lengths` and `reset`."""
        super().__init_subclass__(**kwargs)
        if "lengths" in inspect.signature(cls.sequence).parameters:
            raise TypeError(
                f"{cls.__name__}.sequence: expected (self, x, state, rows), got lengths and reset: "
                "they are rows.lengths and rows.reset"
            )

    def __init__(
        self,
        in_features: int,
        *,
        dtype: FloatingDtype | None = None,
        param_dtype: FloatingDtype = jnp.float32,
        **others: Any,
    ):
        """Keep the options that all layers have, and ignore those that concern parameters."""
        if others.get("time_major"):
            raise TypeError(
                f"{type(self).__name__}: time_major: only RNN, LSTM and GRU have it: swap the axes "
                "of x and y around the call instead"
            )
        self.in_features = in_features
        self.dtype = None if dtype is None else jnp.dtype(dtype)
        self.param_dtype = jnp.dtype(param_dtype)

    def set_view(self, time_axis: str | None = None) -> None:
        """What `nnx.view` calls.

        Args:
            time_axis: the mesh axis over whose devices time is divided: the viewed layer, called
                inside a `jax.shard_map`, has some steps of a longer sequence. `reset` is of these
                steps; states are those before and after the whole sequence.

        Raises:
            NotImplementedError: each step of the layer needs the one before.

        """
        if time_axis is not None:
            if not self.divides_time:
                raise NotImplementedError(
                    f"{type(self).__name__}: time_axis: its time cannot be divided over devices"
                )
            self.time_axis = time_axis

    def computation_dtype(self, x: Float[Array, "..."]) -> jnp.dtype:
        """The `dtype` that the layer was built with, or else that of x and the parameters."""
        return self.dtype or jnp.result_type(x, self.param_dtype)

    @property
    def state_dtype(self) -> jnp.dtype:
        """The dtype of the initial state: `dtype`, else `param_dtype`, and at least float32."""
        return carry_dtype(self.dtype or self.param_dtype)

    def init_state(self, batch_size: int) -> State:
        """The state before the first step: zeros for `batch_size` rows."""
        raise NotImplementedError

    def start(self, batch_size: int) -> State | None:
        """The state passed to `sequence` when the caller gives none.

        Return None if the layer has a cheaper path from zero.
        """
        return self.init_state(batch_size)

    def sequence(
        self,
        x: Float[Array, "batch time in"],
        state: State,
        rows: Rows,
    ) -> tuple[Float[Array, "batch time out"], State]:
        """The layer on checked, batch-major arguments. Inputs beyond a row's length are zero."""
        raise NotImplementedError

    def split(self, x: Float[Array, "batch time in"]) -> Any:
        """The input as `sequence` reads it: x, or a tuple of the streams that x joins."""
        return x

    def joined_sequence(
        self, x: Float[Array, "batch time in"], state: State, rows: Rows
    ) -> tuple[Float[Array, "batch time out"], State]:
        """Runs `sequence` with one array in and out, even if it has several streams."""
        y, state = self.sequence(self.split(x), state, rows)
        return jnp.concatenate(y, axis=-1) if isinstance(y, tuple) else y, state

    def torch_layouts(self) -> Layouts:
        """The weight tables of this layer, by layout name; the first is the one to export to."""
        raise NotImplementedError

    @with_auto_axes
    def __call__(
        self,
        x: Float[ArrayLike, "batch time in"],
        state: State | None = None,
        *,
        lengths: Int[ArrayLike, " batch"] | None = None,
        reset: Bool[ArrayLike, "batch time"] | Bool[ArrayLike, "time batch"] | None = None,
    ) -> tuple[Float[Array, "batch time out"], State]:
        """Run over whole sequences.

        Args:
            x: (batch, time, features), or (time, batch, features) where the layer was built with
                `time_major=True` (an RNN, LSTM or GRU), or one unbatched sequence (time, features).
            state: the state to start from, as `init_state` shapes it (an unbatched sequence's has
                no batch axis); zeros when None.
            lengths: how many steps of each row are real, 0 … time. Outputs beyond are zero, the
                state is the one at the row's end, and a backward direction starts there. Under
                `jit`, which cannot refuse it, a length outside makes the row's outputs and state
                NaN; positions in the state then count the nearest length inside.
            reset: True at the first step of each document or episode: the state restarts before
                that step, so that documents packed into a row stay apart. It has the layout of x
                without features: (batch, time), or (time, batch) with `time_major=True`.

        Returns:
            The outputs, in x's layout, and the state after the last step.

        Raises:
            TypeError: x is not floating, lengths not integer, reset not bool, or the state has
                another structure than `init_state` gives.
            ValueError: a rank or size is wrong, or a length lies outside 0 … time.
            NotImplementedError: `reset` is given to a layer that is not resettable.

        """
        if reset is not None and not self.resettable:
            raise NotImplementedError(f"{type(self).__name__}: reset: {self.unresettable_reason}")
        x = checked_features(x, self.in_features, ranks=(2, 3), time_major=self.time_major)
        batched = x.ndim == 3
        if not batched:
            x = x[None]
        elif self.time_major:
            x = jnp.swapaxes(x, 0, 1)
        batch_size, time = x.shape[:2]
        batch_shape = (batch_size,) if batched else ()
        start = self._batched_state(state, batch_size, batched)
        lengths, outside = checked_lengths(lengths, batch_shape, time)
        reset = checked_reset(reset, (*batch_shape, time), time_major=self.time_major)

        rows = Rows.of(time, lengths, reset, self.time_axis)
        y, last_state = self.joined_sequence(rows.masked(x), start, rows)
        y = rows.masked(y)
        if outside is not None:
            y, last_state = nan_rows(outside, (y, last_state), (0, state_batch_axes(self)))
        if not batched:
            axes = state_batch_axes(self)
            return y[0], jax.tree.map(jnp.squeeze, last_state, axes)
        return (jnp.swapaxes(y, 0, 1) if self.time_major else y), last_state

    def step(
        self,
        x_t: Float[ArrayLike, "batch in"],
        state: State,
        *,
        reset: Bool[ArrayLike, " batch"] | None = None,
    ) -> tuple[Float[Array, "batch out"], State]:
        """Runs one step from the state before it.

        Args:
            x_t: (batch, features), or (features,) unbatched.
            state: the state before the step.
            reset: (batch,), or a single bool unbatched. True for each row whose x_t begins an
                episode: its state restarts before the step, as with `reset` for a whole sequence.

        Raises:
            NotImplementedError: the layer needs the whole sequence, or `reset` is given to a layer
                that is not resettable.
            TypeError, ValueError: as for a whole sequence.

        """
        if not self.causal:
            raise NotImplementedError(f"{type(self).__name__}.step: {self.noncausal_reason}")
        x_t = checked_features(x_t, self.in_features, ranks=(1, 2), time_major=self.time_major)
        time_axis = 0 if self.time_major or x_t.ndim == 1 else 1
        reset = checked_step_reset(reset, x_t.shape[:-1], time_axis)
        y, state = self(jnp.expand_dims(x_t, time_axis), state, reset=reset)
        return jnp.squeeze(y, time_axis), state

    def _batched_state(self, state: State | None, batch_size: int, batched: bool) -> Any:
        if state is None:
            return self.start(batch_size)
        expected = jax.eval_shape(lambda: self.init_state(batch_size))
        if not batched and jax.tree.structure(state) == jax.tree.structure(expected):
            state = jax.tree.map(jnp.expand_dims, state, state_batch_axes(self))
        return checked_state(state, expected)


class HasState(Protocol):
    """A layer or a model that carries a state."""

    def init_state(self, batch_size: int) -> Any:
        """The state before the first step."""
        ...


def state_batch_axes(layer: HasState) -> Any:
    """Which axis of each array of the layer's state counts the batch rows, as `vmap` takes it.

    >>> state_batch_axes(LSTM(64, 256, rngs=nnx.Rngs(0)))
    LSTMState(h=1, c=1)
    """
    if not hasattr(layer, "init_state"):
        raise TypeError(
            f"layer: expected a layer or a model with init_state, got {described(layer)}"
        )
    one = jax.eval_shape(lambda: layer.init_state(1))
    two = jax.eval_shape(lambda: layer.init_state(2))
    return jax.tree.map(
        lambda a, b: next(i for i in range(a.ndim) if a.shape[i] != b.shape[i]), one, two
    )


def refuse_time_major(name: str, layer: SequenceLayer) -> None:
    """Refuse a time-major layer inside another layer."""
    if layer.time_major:
        raise ValueError(
            f"{name}: expected a layer with time_major=False, got True: swap the axes of x around "
            "the whole instead, as jnp.swapaxes(x, 0, 1) does"
        )


def check_time(name: str, time: int, max_length: int) -> None:
    """Refuse more steps than a layer was built for.

    Of a symbolic number JAX has to know that it is not larger: `jax.export.symbolic_shape("b, t",
    constraints=["t <= 128"])`.
    """
    if checked_count(name, time) > max_length:
        raise ValueError(
            f"{name}: expected at most max_length={max_length} steps, got {time}; build the layer "
            "with a larger max_length"
        )


def checked_features(x, in_features: int, *, ranks: tuple[int, int], time_major: bool) -> Array:
    """The features as an array of one of the ranks (unbatched, batched), or the fault."""
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
    """`lengths` (a scalar for an unbatched sequence) as `lengths_within` gives them, or None."""
    if lengths is None:
        return None, None
    if not isinstance(lengths, jax.Array):
        lengths = as_array("lengths", lengths, np.asarray)
    lengths = checked_array("lengths", lengths, Int, batch_shape)
    return lengths_within(lengths.reshape(-1), time)


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
    """Returns the `reset` of a step as that of a sequence of one step, or raises an error."""
    if reset is None:
        return None
    reset = checked_array("reset", as_array("reset", reset), Bool, shape)
    return jnp.expand_dims(reset, time_axis)


def checked_state(state: State, expected: State) -> State:
    """`state` as arrays, if it has the structure and the shapes of `expected`, or the fault."""
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
    """Refuse another structure, naming the innermost field that has it."""
    if jax.tree.structure(state) == jax.tree.structure(expected):
        return
    if type(state) is type(expected) and hasattr(expected, "_fields"):
        for field, theirs, ours in zip(expected._fields, state, expected, strict=True):
            _check_structure(f"{name}.{field}", theirs, ours)
    array = described(expected).replace("a ShapeDtypeStruct", "an array")
    raise TypeError(f"{name}: expected {array}, got {described(state)}")
