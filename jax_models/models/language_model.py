"""Language models: tokens in, next-token logits out, over any of the sequence layers."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Required, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jax_models.explicit_axes import with_auto_axes
from jax_models.layers.stack import Remat, Stack
from jax_models.mesh_axes import VOCABULARY, first_axis, last_axis
from jax_models.ops.checks import as_array, nan_rows
from jax_models.ops.rows import Rows
from jax_models.options import CheckedFields, CheckedOptions, FloatingDtype
from jax_models.sequence import (
    SequenceLayer,
    checked_lengths,
    checked_reset,
    checked_state,
    checked_step_reset,
)
from jax_models.weights import Layouts


class BuildOptions(TypedDict, total=False):
    """What a model takes beside its config."""

    dtype: FloatingDtype | None
    param_dtype: FloatingDtype
    rngs: Required[nnx.Rngs]


@dataclasses.dataclass(frozen=True)
class LanguageModelConfig(CheckedFields):
    """The base class of the configs of all language models. Their integers are positive."""

    vocab_size: int
    """Number of distinct tokens."""

    def build(self, **options: Unpack[BuildOptions]) -> "LanguageModel":
        """The model of this config."""
        raise NotImplementedError(f"{type(self).__name__}: a subclass builds the model")


@dataclasses.dataclass(frozen=True)
class StackConfig(LanguageModelConfig):
    """A language model of equal blocks."""

    remat: Remat = dataclasses.field(default="none", kw_only=True)
    """What the backward pass recomputes: "none", nothing; "dots", everything except the results of
    matrix products; "full", everything except the inputs of the blocks."""
    scan_layers: bool = dataclasses.field(default=False, kw_only=True)
    """Compile one block and reuse it for all: faster to compile, slower to run on a CPU."""

    def stack(self, blocks: Iterable[SequenceLayer]) -> Stack:
        """The blocks, one after the other."""
        return Stack(blocks, remat=self.remat, scan_layers=self.scan_layers)


class LanguageModelState(NamedTuple):
    """What a language model carries: its layers' state, and each row's position."""

    layers: Any
    position: Int[Array, " batch"]


class LanguageModel(CheckedOptions, nnx.Module):
    """Tokens (batch, time) → logits (batch, time, vocab_size) of each next token.

        >>> model = RWKVLanguageModelConfig(features=64, num_layers=2).build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))
        >>> logits, state = model.step(jnp.zeros(8, int), state)

        logits = head(norm(layers(embedding(tokens) + pos_embedding(position))))

    The contract is a sequence layer's: state in and out, `step`, `lengths`, `reset`. A model with a
    `context_length` counts positions from its state, or from the last `reset`; beyond that length,
    as under `jit` for tokens outside the vocabulary and for rows whose length lies outside
    0 … time, its logits are NaN. Subclasses set the attributes.
    """

    config: LanguageModelConfig
    embedding: nnx.Embed
    pos_embedding: nnx.Embed | None
    layers: SequenceLayer
    norm: Callable[[Array], Array]
    head: Callable[[Array], Array]
    time_axis: str | None = None

    @property
    def context_length(self) -> int | None:
        """How many positions the model knows. None: it has no positions, and no limit."""
        return None if self.pos_embedding is None else self.pos_embedding.num_embeddings

    def set_view(self, time_axis: str | None = None) -> None:
        """What `nnx.view` calls: `time_axis` is as a sequence layer's."""
        self.time_axis = time_axis or self.time_axis

    mesh_axes = last_axis(VOCABULARY, "head") | first_axis(VOCABULARY, "embedding")

    def torch_layouts(self) -> Layouts:
        """A subclass's weight tables, by layout name."""
        raise NotImplementedError

    def embed(
        self, tokens: Int[Array, "batch time"], positions: Int[Array, "batch time"]
    ) -> Float[Array, "batch time features"]:
        """What the layers read: the embeddings of the tokens and, if there are any, positions."""
        x = self.embedding(tokens)
        return x if self.pos_embedding is None else x + self.pos_embedding(positions)

    def read_out(self, x: Float[Array, "batch time out"]) -> Float[Array, "batch time features"]:
        """What of the layers' output the norm and the head read: all of it."""
        return x

    def init_state(self, batch_size: int) -> LanguageModelState:
        """The state before the first token."""
        return LanguageModelState(
            self.layers.init_state(batch_size), jnp.zeros(batch_size, jnp.int32)
        )

    @with_auto_axes
    def __call__(
        self,
        tokens: Int[ArrayLike, "batch time"],
        state: LanguageModelState | None = None,
        *,
        lengths: Int[ArrayLike, " batch"] | None = None,
        reset: Bool[ArrayLike, "batch time"] | None = None,
    ) -> tuple[Float[Array, "batch time vocab"], LanguageModelState]:
        """Run over whole sequences; the arguments are those of `SequenceLayer`.

        Raises:
            TypeError: tokens or lengths are not integers, reset not bool, or the state has another
                structure than `init_state` gives.
            ValueError: a rank or size is wrong, a token is not in the vocabulary, or the sequence
                exceeds `context_length`.

        """
        tokens = checked_tokens("tokens", tokens, self.config.vocab_size)
        if tokens.ndim != 2:
            raise ValueError(f"tokens: expected shape (batch, time), got {tokens.shape}")
        batch_size, time = tokens.shape
        limit = self.context_length
        steps = time if self.time_axis is None else time * jax.lax.axis_size(self.time_axis)
        if limit is not None and steps > limit and reset is None:
            raise ValueError(f"tokens: expected at most context_length={limit} steps, got {steps}")
        ends, outside = checked_lengths(lengths, (batch_size,), time)
        reset = checked_reset(reset, tokens.shape)
        if state is None:
            start, before = None, jnp.zeros(batch_size, jnp.int32)
        else:
            expected = jax.eval_shape(lambda: self.init_state(batch_size))
            start, before = checked_state(state, expected)

        rows = Rows.of(time, ends, reset, self.time_axis)
        positions, after = rows.positions(before, time)
        x = self.embed(tokens, positions)
        x, layers = self.layers(x, start, lengths=lengths, reset=reset)
        logits = rows.masked(self.head(self.norm(self.read_out(x))))
        if outside is not None:
            logits = nan_rows(outside, logits, 0)
        return logits, LanguageModelState(layers, after)

    def step(
        self,
        token: Int[ArrayLike, " batch"],
        state: LanguageModelState,
        *,
        reset: Bool[ArrayLike, " batch"] | None = None,
    ) -> tuple[Float[Array, "batch vocab"], LanguageModelState]:
        """Runs one token of each row from the state before it.

        `reset` (batch,) is true for rows whose token begins a document, as in `SequenceLayer.step`.
        """
        token = checked_tokens("token", token, self.config.vocab_size)
        if token.ndim != 1:
            raise ValueError(f"token: expected shape (batch,), got {token.shape}")
        reset = checked_step_reset(reset, token.shape, 1)
        logits, state = self(token[:, None], state, reset=reset)
        return logits[:, 0], state


def checked_tokens(name: str, tokens, vocab_size: int) -> Int[Array, "..."]:
    """Tokens as an array, if they are integers in 0 … vocab_size − 1; traced ones end as NaN."""
    values = tokens if isinstance(tokens, Tracer) else as_array(name, tokens, np.asarray)
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise TypeError(f"{name}: expected an integer dtype, got {values.dtype}")
    outside = (values < 0) | (values >= vocab_size)
    if isinstance(values, np.ndarray):
        if outside.any():
            found = sorted(set(values[outside].tolist()))[:10]
            raise ValueError(f"{name}: expected values in 0 … {vocab_size - 1}, got {found}")
        return jax.device_put(values)  # `jnp.asarray` would compile a program for each shape
    return jnp.where(outside, vocab_size, values)
