"""The language model: maps tokens to logits of the next token with any of the sequence layers."""

__all__ = ["LanguageModel", "LanguageModelState"]

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jax_models import ops
from jax_models.auto_axes import with_auto_axes
from jax_models.call_arguments import (
    checked_reset,
    checked_spans,
    checked_state,
    checked_step_reset,
    state_batch_axes,
)
from jax_models.checks.removed import refusing
from jax_models.checks.values import as_array, set_rows_to_nan
from jax_models.layers.dropout import Dropout
from jax_models.layers.stack import Remat, Stack
from jax_models.mesh_axes import VOCABULARY, first_axis, last_axis
from jax_models.models.architecture import Layout
from jax_models.models.configs import LanguageModelConfig
from jax_models.ops.rows import Rows, roll_rows
from jax_models.options import CheckedOptions
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, Table, nested, same, tied, transposed
from jax_models.weights.layouts import with_shared_rows
from jax_models.weights.rows import join


class LanguageModelState(NamedTuple):
    """The state of a language model: the state of its blocks, and each row's position."""

    layers: Any
    position: Int[Array, " batch"]


class Blocks(Stack):
    """The blocks of a model as one layer. `Stack` checked them when the model was built."""

    def __init__(self, config: LanguageModelConfig, blocks: nnx.List):
        remat: Remat = getattr(config, "remat", "none")
        self._set_layers(blocks, remat, getattr(config, "scan_layers", False))


def _renamed(*_: Any) -> Any:
    raise AttributeError(
        "LanguageModel.layers is now called blocks, and the parameters of block 0 are at blocks.0 "
        "instead of layers.layers.0: see docs/migration.md"
    )


class LanguageModel(CheckedOptions, nnx.Module):
    """Maps tokens (batch, time) to logits (batch, time, vocab_size) of each next token.

        >>> rngs = nnx.Rngs(0)
        >>> model = LanguageModel(
        ...     LanguageModelConfig(vocab_size=20),
        ...     embedding=nnx.Embed(20, 64, rngs=rngs),
        ...     blocks=[HawkBlock(64, 96, rngs=rngs), HawkBlock(64, 96, rngs=rngs)],
        ...     norm=RMSNorm(64, rngs=rngs),
        ... )
        >>> logits, state = model(jnp.zeros((8, 100), int))
        >>> logits, state = model.step(jnp.zeros(8, int), state)

        x = dropout(embedding_scale · embedding(tokens) + pos_embedding(position))
        logits = head(norm(blocks(x)))

    A model is called like a sequence layer, with a state in and out, `step`, `lengths`, `starts`
    and `reset`. A model with a `context_length` counts positions from its state, or from the last
    `reset`. Its logits are NaN beyond that length and, under `jit`, for tokens outside the
    vocabulary and for rows whose length lies outside 0 … time.

    Args:
        config: the config, which holds the size of the vocabulary, and the `context_length` if
            there is one.
        blocks: the blocks from the lowest up, or one layer, such as an LSTM of several layers.
        norm: normalizes the output of the blocks.
        head: maps the normalized output to logits. None: `x Eᵀ`, where E is the embedding's matrix.
        embedding: the embedding of the tokens.
        pos_embedding: the embedding of the positions. None: positions are not embedded.
        dropout: dropout of the sum of both embeddings in training.
        embedding_scale: the factor by which token embeddings are multiplied.
        logits_soft_cap: logits are cap · tanh(logits / cap). 0: no cap.

    Raises:
        TypeError, ValueError: the blocks do not fit each other, as for `Stack`.

    Layouts: those that the class of the config declares and all blocks have.

    """

    blocks: SequenceLayer | nnx.List[SequenceLayer]
    time_axis: str | None = None
    layers = property(_renamed, _renamed)

    def __init__(
        self,
        config: LanguageModelConfig,
        blocks: SequenceLayer | Iterable[SequenceLayer],
        norm: Callable[[Array], Array],
        head: Callable[[Array], Array] | None = None,
        *,
        embedding: nnx.Embed,
        pos_embedding: nnx.Embed | None = None,
        dropout: Dropout | None = None,
        embedding_scale: float = 1.0,
        logits_soft_cap: float = 0.0,
    ):
        self.config = config
        self.embedding, self.pos_embedding, self.dropout = embedding, pos_embedding, dropout
        for table in (embedding, pos_embedding):
            if table is not None:
                table.embedding.set_metadata(is_matrix=False)  # a vector for each token or position
        self.embedding_scale, self.logits_soft_cap = embedding_scale, logits_soft_cap
        self.blocks = blocks if isinstance(blocks, SequenceLayer) else Stack(blocks).layers
        self.norm, self.head = norm, head
        if embedding.features != (expected := self.stack.in_features):
            raise ValueError(
                f"embedding: expected features={expected}, as the blocks read, got "
                f"{embedding.features}"
            )

    @property
    def stack(self) -> SequenceLayer:
        """The blocks as one layer."""
        blocks = self.blocks
        return blocks if isinstance(blocks, SequenceLayer) else Blocks(self.config, blocks)

    @property
    def context_length(self) -> int | None:
        """The longest sequence that the model can read. None: there is no limit."""
        positions = self.pos_embedding
        longest = None if positions is None else positions.num_embeddings
        return getattr(self.config, "context_length", longest)

    def set_view(self, time_axis: str | None = None) -> None:
        """Sets options in a view, like `SequenceLayer.set_view`."""
        self.time_axis = time_axis or self.time_axis

    @property
    def losses(self) -> dict[str, Float[Array, ""]]:
        """The losses of the last call in training, by name, to add to the loss of the tokens.

        Most models have none. A model whose config has `balance_experts` has a `balance_loss`.
        """
        return {}

    mesh_axes = last_axis(VOCABULARY, "head") | first_axis(VOCABULARY, "embedding")

    def foreign_format(self, keys: Iterable[object]) -> str | None:
        """Describes the other model that has these keys, for the error message of `from_torch`."""
        return self.config.foreign_format(keys)

    def torch_layouts(self) -> Layouts:
        """The tables of the config's layouts that all blocks have."""
        numbered: Iterable[tuple[Any, SequenceLayer]] = (
            [("", self.blocks)]
            if isinstance(self.blocks, SequenceLayer)
            else enumerate(self.blocks)
        )
        blocks = [(str(number), block.torch_layouts()) for number, block in numbered]
        tables = {}
        for name, layout in self.config.layouts.items():
            inner = layout.blocks_layout or name
            if all(inner in table for _, table in blocks) and (layout.head or not self.head):
                rows = [row for i, table in blocks for row in nested(table[inner], i, i)]
                table = [*self._ends(layout), *nested(rows, "blocks", layout.blocks)]
                tables[name] = with_shared_rows(self, table, repeats=self.repeats_tied(layout))
        return tables

    def repeats_tied(self, layout: Layout) -> bool:
        """Whether `to_torch` writes an array that has several keys under each of them.

        As transformers does, files leave out such keys only if the head is tied.
        """
        return layout.repeats_embedding or self.head is not None

    def _ends(self, layout: Layout) -> Table:
        """The rows of the embeddings, the last norm and the head."""
        table, head = "embedding.embedding", layout.head
        rows = [same(table, layout.embedding)]
        if head is not None and self.head is not None:
            rows += [transposed("head.kernel", head), *_bias("head", self.head, head)]
        elif head is not None:
            written = (layout.embedding, head)[: 1 + self.repeats_tied(layout)]
            rows = [tied(table, written, optional=(head,))]
        if self.pos_embedding is not None and layout.positions is not None:
            rows.append(layout.positions)
        return [*rows, same("norm.scale", layout.norm), *_bias("norm", self.norm, layout.norm)]

    def embed(
        self, tokens: Int[Array, "batch time"], positions: Int[Array, "batch time"]
    ) -> Float[Array, "batch time features"]:
        """Returns the input of the blocks: the embeddings of tokens and, if any, of positions."""
        x = self.embedding(tokens)
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        if self.pos_embedding is not None:
            x = x + self.pos_embedding(positions)
        return x if self.dropout is None else self.dropout(x)

    def read_out(self, x: Any) -> Float[Array, "batch time features"]:
        """Returns the part of the blocks' output that the norm reads, the first item of a tuple."""
        return x[0] if isinstance(x, tuple) else x

    def unembed(self, x: Float[Array, "batch time features"]) -> Float[Array, "batch time vocab"]:
        """Maps the normalized output of the blocks to logits."""
        if self.head is not None:
            return capped(self.head(x), self.logits_soft_cap)
        logits = ops.affine(x, self.embedding.embedding[...].T.astype(x.dtype))
        return capped(logits, self.logits_soft_cap).astype(x.dtype)

    def init_state(self, batch_size: int) -> LanguageModelState:
        """The state before the first token."""
        position = jnp.zeros(batch_size, jnp.int32)
        return LanguageModelState(self.stack.init_state(batch_size), position)

    @with_auto_axes
    def __call__(
        self,
        tokens: Int[ArrayLike, "batch time"],
        state: LanguageModelState | None = None,
        *,
        lengths: Int[ArrayLike, " batch"] | None = None,
        starts: Int[ArrayLike, " batch"] | None = None,
        reset: Bool[ArrayLike, "batch time"] | None = None,
    ) -> tuple[Float[Array, "batch time vocab"], LanguageModelState]:
        """Runs over whole sequences. The arguments are those of a `SequenceLayer`.

        Raises:
            TypeError: tokens, lengths or starts are not integers, reset is not bool, or the
                structure of the state differs from that of `init_state`.
            ValueError: a rank or size is wrong, a token is not in the vocabulary, or the sequence
                exceeds `context_length`.

        """
        x, last, rows, starts, outside = self._hidden(tokens, state, lengths, starts, reset)
        logits = roll_rows(rows.masked(self.unembed(x)), starts)
        if outside is not None:
            logits, last = set_rows_to_nan(outside, (logits, last), (0, state_batch_axes(self)))
        return logits, last

    @with_auto_axes
    def last_logits(
        self,
        tokens: Int[ArrayLike, "batch time"],
        state: LanguageModelState | None = None,
        *,
        lengths: Int[Array, " batch"] | Int[np.ndarray, " batch"],
    ) -> tuple[Float[Array, "batch vocab"], LanguageModelState]:
        """Runs over whole sequences, and computes only the logits after the last token of each row.

        In a model with a large vocabulary, the logits of the other tokens would take most of the
        time. Each length must lie in 1 … time.
        """
        x, last, _, _, _ = self._hidden(tokens, state, lengths, None, None)
        x = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
        return self.unembed(x)[:, 0], last

    def _hidden(self, tokens, state, lengths, starts, reset):
        """Returns what `unembed` reads, the last state, the rows, their starts, and a mask.

        The mask is that of `checked_spans`.
        """
        tokens = checked_tokens("tokens", tokens, self.config.vocab_size)
        if tokens.ndim != 2:
            raise ValueError(f"tokens: expected shape (batch, time), got {tokens.shape}")
        # With `reset`, the limit applies to each document rather than to the row, since positions
        # restart.
        batch_size, time = tokens.shape
        limit = self.context_length
        steps = time if self.time_axis is None else time * jax.lax.axis_size(self.time_axis)
        if limit is not None and steps > limit and reset is None:
            raise ValueError(f"tokens: expected at most context_length={limit} steps, got {steps}")
        ends, starts, outside = checked_spans(lengths, starts, (batch_size,), time)
        reset = checked_reset(reset, tokens.shape)
        tokens = roll_rows(tokens, starts, back=True)
        reset = roll_rows(reset, starts, back=True)
        stack = self.stack
        if reset is not None and not stack.resettable:
            raise NotImplementedError(f"{type(self).__name__}: reset: {stack.unresettable_reason}")
        if state is None:
            start, before = stack.start(batch_size), jnp.zeros(batch_size, jnp.int32)
        else:
            start, before = checked_state(self, state, batch_size)

        # Padding is set to zero before the blocks, before the norm and after the head.
        rows = Rows.of(time, ends, reset, self.time_axis)
        positions, after = rows.positions(before, time)
        x = rows.masked(self.embed(tokens, positions))
        x, layers = stack.sequence(stack.split(x), start, rows)
        x = self.norm(rows.masked(self.read_out(x)))
        return x, LanguageModelState(layers, after), rows, starts, outside

    def step(
        self,
        token: Int[ArrayLike, " batch"],
        state: LanguageModelState,
        *,
        reset: Bool[ArrayLike, " batch"] | None = None,
    ) -> tuple[Float[Array, "batch vocab"], LanguageModelState]:
        """Runs one token of each row, given the state before it.

        `reset` (batch,) is true in rows whose token begins a new document, as in
        `SequenceLayer.step`.
        """
        token = checked_tokens("token", token, self.config.vocab_size)
        if token.ndim != 1:
            raise ValueError(f"token: expected shape (batch,), got {token.shape}")
        stack = self.stack
        if not stack.causal:
            raise NotImplementedError(f"{type(self).__name__}: step: {stack.noncausal_reason}")
        reset = checked_step_reset(reset, token.shape, 1)
        logits, state = self(token[:, None], state, reset=reset)
        return logits[:, 0], state


def capped(logits: Float[Array, "*shape"], cap: float) -> Float[Array, "*shape"]:
    """`cap · tanh(logits / cap)`, or the logits themselves if the cap is 0."""
    return cap * jnp.tanh(logits / cap) if cap else logits


def _bias(part: str, module: Any, key: str) -> Table:
    """The row of the bias of a norm or a head, beside the key of its scale or kernel."""
    if getattr(module, "bias", None) is None:
        return []
    return [same(f"{part}.bias", join(key.rpartition(".")[0], "bias"))]


def checked_tokens(name: str, tokens, vocab_size: int) -> Int[Array, "..."]:
    """Returns the tokens as an array, or raises an error if one is not in 0 … vocab_size − 1.

    Traced tokens outside that range become vocab_size, so that their logits are NaN.
    """
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


_MOVED = {
    "BlocksConfig": "import it from jax_models.models.configs",
    "StackConfig": "import it from jax_models.models.configs",
    "Preset": "declare presets as a mapping of names to options",
}
"""What to do instead of importing names that this module had."""

if not TYPE_CHECKING:
    __getattr__ = refusing(__name__, _MOVED)
