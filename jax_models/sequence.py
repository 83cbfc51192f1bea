"""The interface that all sequence layers share: arguments, layouts, lengths and resets."""

__all__ = ["SequenceLayer"]

import inspect
from typing import Any, ClassVar, Generic

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jax_models.auto_axes import with_auto_axes
from jax_models.call_arguments import (
    State,
    checked_features,
    checked_reset,
    checked_spans,
    checked_state,
    checked_step_reset,
    state_batch_axes,
)
from jax_models.checks.values import checked_count, set_rows_to_nan
from jax_models.ops import Rows, carry_dtype
from jax_models.ops.rows import roll_rows
from jax_models.options import CheckedOptions, FloatingDtype
from jax_models.weights import Layouts


class SequenceLayer(CheckedOptions, nnx.Module, Generic[State]):
    """The base class of layers that map sequences to sequences and carry a state.

        >>> layer = LSTM(64, 256, rngs=nnx.Rngs(0))
        >>> y, state = layer(jnp.ones((8, 100, 64)))
        >>> y_t, state = layer.step(jnp.ones((8, 64)), state)

    `layer(x, state) -> (y, state)` runs over whole sequences, `layer.step(x_t, state)` over one
    step. Pass the returned state to the next call to continue a sequence. A sequence that is split
    anywhere gives the same outputs as the whole sequence, and T steps give the same outputs as one
    call.

    A subclass sets `in_features`, `time_major`, `causal` (whether there is a `step`), `resettable`
    (whether documents can be packed) and `divides_time` (whether `time_axis` is supported), and
    defines `init_state` and `sequence`. Its `sequence` receives only checked, batched, batch-major
    arguments. The arguments of its constructor are checked against their annotations
    (`CheckedOptions`).
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
        """Refuses a `sequence` with the arguments `lengths` and `reset` of earlier versions."""
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
        """Stores the options that all layers have, and ignores those that concern parameters."""
        if others.get("time_major"):
            raise TypeError(
                f"{type(self).__name__}: time_major: only RNN, LSTM and GRU have it: swap the axes "
                "of x and y around the call instead"
            )
        self.in_features = in_features
        self.dtype = None if dtype is None else jnp.dtype(dtype)
        self.param_dtype = jnp.dtype(param_dtype)

    def set_view(self, time_axis: str | None = None) -> None:
        """Sets these options in a view: `nnx.view` calls this method.

        Args:
            time_axis: the mesh axis over which time is divided. Call the view inside a
                `jax.shard_map`, where each device has some steps of a longer sequence. `reset`
                refers to these steps, whereas states are those before and after the whole sequence.

        Raises:
            NotImplementedError: the layer does not support dividing time over devices.

        """
        if time_axis is not None:
            if not self.divides_time:
                raise NotImplementedError(
                    f"{type(self).__name__}: time_axis: its time cannot be divided over devices"
                )
            self.time_axis = time_axis

    def computation_dtype(self, x: Float[Array, "..."]) -> jnp.dtype:
        """The `dtype` of the layer, or by default that to which x and parameters promote."""
        return self.dtype or jnp.result_type(x, self.param_dtype)

    @property
    def state_dtype(self) -> jnp.dtype:
        """The dtype of the initial state: `dtype`, or else `param_dtype`, and at least float32."""
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
        """Runs the layer on checked, batch-major arguments. Inputs in the padding are zero."""
        raise NotImplementedError

    def split(self, x: Float[Array, "batch time in"]) -> Any:
        """Returns the input of `sequence`: x, or a tuple of the parts concatenated in x."""
        return x

    def joined_sequence(
        self, x: Float[Array, "batch time in"], state: State, rows: Rows
    ) -> tuple[Float[Array, "batch time out"], State]:
        """Runs `sequence` with single arrays as input and output, even if it uses tuples."""
        y, state = self.sequence(self.split(x), state, rows)
        return jnp.concatenate(y, axis=-1) if isinstance(y, tuple) else y, state

    def torch_layouts(self) -> Layouts:
        """The weight tables of this layer by layout name. By default, `to_torch` exports the first.

        A layer may also define `foreign_format(keys)`, which returns an error message if the keys
        are those of a model that is easily confused with it, or else None. It may also define
        `missing_layout(layout)`, which says why it lacks a layout of this name, or returns None.
        """
        raise NotImplementedError

    @with_auto_axes
    def __call__(
        self,
        x: Float[ArrayLike, "batch time in"],
        state: State | None = None,
        *,
        lengths: Int[ArrayLike, " batch"] | None = None,
        starts: Int[ArrayLike, " batch"] | None = None,
        reset: Bool[ArrayLike, "batch time"] | Bool[ArrayLike, "time batch"] | None = None,
    ) -> tuple[Float[Array, "batch time out"], State]:
        """Runs over whole sequences.

        Args:
            x: (batch, time, features), or (time, batch, features) if the layer was built with
                `time_major=True` (an RNN, LSTM or GRU), or one unbatched sequence (time, features).
            state: the state before the first step, with the shapes of `init_state` but without the
                batch axis for an unbatched sequence. None: the state of `init_state`.
            lengths: the number of steps of each row before its padding, 0 … time. Outputs in the
                padding are zero, the returned state is the state at the end of each row, and a
                backward direction starts there. Under `jit`, where no error can be raised, a length
                outside that range makes the row's outputs and state NaN, and positions in the state
                count the nearest length inside.
            starts: the number of padding steps before each row, for rows that are padded on the
                left. The real steps of row b are starts[b] ≤ t < lengths[b], and all results are
                those of these steps alone: outputs in the padding are zero, the given state is the
                one before the first real step, and a backward direction ends there. None: 0.
            reset: True at the first step of each document or episode: the state restarts before
                that step, so that packed documents do not see each other. The layout is that of x
                without features: (batch, time), or (time, batch) with `time_major=True`. A backward
                direction restarts at the end of each document, and its last state is that of the
                row's first document, so mark padding at the start of a row in `starts` instead.

        Returns:
            The outputs, in x's layout, and the state after the last step.

        Raises:
            TypeError: x is not floating, lengths or starts are not integers, reset is not bool, or
                the structure of the state differs from that of `init_state`.
            ValueError: a rank or size is wrong, a length lies outside 0 … time, or a start lies
                outside 0 … its row's length.
            NotImplementedError: `reset` is given to a layer that is not resettable.

        """
        if reset is not None and not self.resettable:
            raise NotImplementedError(f"{type(self).__name__}: reset: {self.unresettable_reason}")
        # Check all arguments, and convert them to the batched, batch-major layout.
        x = checked_features(x, self.in_features, ranks=(2, 3), time_major=self.time_major)
        batched = x.ndim == 3
        if not batched:
            x = x[None]
        elif self.time_major:
            x = jnp.swapaxes(x, 0, 1)
        batch_size, time = x.shape[:2]
        batch_shape = (batch_size,) if batched else ()
        if state is None:
            start: Any = self.start(batch_size)
        else:
            start = checked_state(self, state, batch_size, batched=batched)
        lengths, starts, outside = checked_spans(lengths, starts, batch_shape, time)
        reset = checked_reset(reset, (*batch_shape, time), time_major=self.time_major)
        # Move rows that are padded on the left, so that the layer sees padding only at the end.
        x = roll_rows(x, starts, back=True)
        reset = roll_rows(reset, starts, back=True)

        # Set the padding to zero before and after the layer, so that its content cannot reach a
        # result.
        rows = Rows.of(time, lengths, reset, self.time_axis)
        y, last_state = self.joined_sequence(rows.masked(x), start, rows)
        y = roll_rows(rows.masked(y), starts)
        # Under `jit`, a wrong length cannot raise an error, so the row becomes NaN.
        if outside is not None:
            y, last_state = set_rows_to_nan(outside, (y, last_state), (0, state_batch_axes(self)))
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
        """Runs one step, given the state before it.

        Args:
            x_t: (batch, features), or (features,) unbatched.
            state: the state before the step.
            reset: (batch,), or a single bool if unbatched. True for each row whose x_t begins a
                document or an episode: its state restarts before the step, as with `reset` for a
                whole sequence.

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


def refuse_time_major(name: str, layer: SequenceLayer) -> None:
    """Refuses a time-major layer inside another layer."""
    if layer.time_major:
        raise ValueError(
            f"{name}: expected a layer with time_major=False, got True: swap the axes of x around "
            "the whole instead, as jnp.swapaxes(x, 0, 1) does"
        )


def check_time(name: str, time: int, max_length: int) -> None:
    """Refuses more steps than a layer was built for.

    If the number of steps is symbolic, declare the limit:
    `jax.export.symbolic_shape("b, t", constraints=["t <= 128"])`.
    """
    if checked_count(name, time) > max_length:
        raise ValueError(
            f"{name}: expected at most max_length={max_length} steps, got {time}; build the layer "
            "with a larger max_length"
        )
