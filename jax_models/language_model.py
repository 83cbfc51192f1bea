"""Language models: tokens in, next-token logits out, over any of the sequence layers."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jax_models.gru import GRU
from jax_models.layer_norm import LayerNorm
from jax_models.lstm import LSTM
from jax_models.rnn import RNN
from jax_models.sequence import (
    SequenceLayer,
    State,
    checked_lengths,
    checked_reset,
    checked_state,
    mask_padding,
)
from jax_models.torch_weights import Layouts, embedding, layer_norm, linear, nested


@dataclasses.dataclass(frozen=True)
class LanguageModelConfig:
    """What every language model's config says; its subclasses are the models there are."""

    vocab_size: int
    """Number of distinct tokens."""
    context_length: int | None
    """Positions that the model knows. None: it has no positions, and no limit."""

    def build(self, **kwargs: Any) -> "LanguageModel":
        """The model; `kwargs` are its `dtype`, `param_dtype` and `rngs`."""
        raise NotImplementedError


class LanguageModelState(NamedTuple):
    """What a language model carries: its layers' state, and each row's position."""

    layers: State
    position: Int[Array, " batch"]


class LanguageModel(nnx.Module):
    """Tokens (batch, time) → logits (batch, time, vocab_size) of each next token.

        logits = head(norm(layers(embedding(tokens) + pos_embedding(position))))

    The contract is a sequence layer's: state in and out, `step`, `lengths`, `reset`. A model with a
    `context_length` counts positions from its state, or from the last `reset`; beyond that length,
    as under `jit` for tokens outside the vocabulary, its logits are NaN. Subclasses set the
    attributes.
    """

    config: LanguageModelConfig
    embedding: nnx.Embed
    pos_embedding: nnx.Embed | None
    layers: SequenceLayer
    norm: Callable[[Array], Array]
    head: Callable[[Array], Array]

    def torch_layouts(self) -> Layouts:
        """The weight tables of this model, by layout name."""
        raise NotImplementedError

    def init_state(self, batch_size: int) -> LanguageModelState:
        """The state before the first token."""
        return LanguageModelState(
            self.layers.init_state(batch_size), jnp.zeros(batch_size, jnp.int32)
        )

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
        limit = self.config.context_length
        if limit is not None and time > limit and reset is None:
            raise ValueError(f"tokens: expected at most context_length={limit} steps, got {time}")
        lengths = checked_lengths(lengths, (batch_size,), time)
        reset = checked_reset(reset, tokens.shape)
        start = self.init_state(batch_size)
        if state is not None:
            start = checked_state(state, start)

        positions = positions_after(start.position, time, reset)
        x = self.embedding(tokens)
        if self.pos_embedding is not None:
            x = x + self.pos_embedding(positions)
        x, layers = self.layers(x, start.layers, lengths=lengths, reset=reset)
        logits = mask_padding(self.head(self.norm(x)), lengths)

        counts = jnp.concatenate([start.position[:, None], positions + 1], axis=1)
        last = jnp.full(batch_size, time, jnp.int32) if lengths is None else lengths
        position = jnp.take_along_axis(counts, last[:, None], axis=1)[:, 0]
        return logits, LanguageModelState(layers, position)

    def step(
        self, token: Int[ArrayLike, " batch"], state: LanguageModelState
    ) -> tuple[Float[Array, "batch vocab"], LanguageModelState]:
        """One token of each row, and the state before it."""
        token = jnp.asarray(token)
        if token.ndim != 1:
            raise ValueError(f"token: expected shape (batch,), got {token.shape}")
        logits, state = self(token[:, None], state)
        return logits[:, 0], state


def checked_tokens(name: str, tokens, vocab_size: int) -> Int[Array, "..."]:
    """Tokens as an array, if they are integers in 0 … vocab_size − 1; traced ones end as NaN."""
    values = tokens if isinstance(tokens, Tracer) else np.asarray(tokens)
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise TypeError(f"{name}: expected an integer dtype, got {values.dtype}")
    outside = (values < 0) | (values >= vocab_size)
    if isinstance(values, np.ndarray):
        if outside.any():
            found = sorted(set(values[outside].tolist()))[:10]
            raise ValueError(f"{name}: expected values in 0 … {vocab_size - 1}, got {found}")
        return jnp.asarray(values)
    return jnp.where(outside, vocab_size, values)


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


CELLS = {"rnn": RNN, "lstm": LSTM, "gru": GRU}


@dataclasses.dataclass(frozen=True)
class RNNLanguageModelConfig(LanguageModelConfig):
    """The recurrent language model; the defaults are the seed's."""

    vocab_size: int = 20
    """Number of distinct tokens."""
    context_length: int | None = 8
    """Positions that the model knows. None: it has no positions, and no limit."""
    embedding_features: int = 10
    """Size of the token and position embeddings."""
    hidden_features: int = 20
    """Size of the hidden state."""
    cell: Literal["rnn", "lstm", "gru"] = "rnn"
    """The recurrence."""
    num_layers: int = 1
    """Layers of it."""
    dropout_rate: float = 0.0
    """Dropout between the layers."""

    def __post_init__(self):
        """Refuse sizes and cells that there are not."""
        for name in ("vocab_size", "embedding_features", "hidden_features", "num_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected a positive integer, got {getattr(self, name)}")
        if self.context_length is not None and self.context_length < 1:
            raise ValueError(f"context_length: expected at least 1, got {self.context_length}")
        if self.cell not in CELLS:
            raise ValueError(f"cell: expected one of {sorted(CELLS)}, got {self.cell!r}")

    def build(self, **kwargs: Any) -> "RNNLanguageModel":
        """`RNNLanguageModel(self, …)`."""
        return RNNLanguageModel(self, **kwargs)


class RNNLanguageModel(LanguageModel):
    """Token and position embeddings → RNN, LSTM or GRU → LayerNorm → Linear (seed 001).

    Args:
        config: the sizes.
        dtype: of the computation; by default the parameters'.
        param_dtype: of the parameters.
        rngs: draws the parameters (`params`) and the dropout masks (`dropout`).

    Layouts: `scratch`, the seed's RNNLanguageModel, where the cell is one layer of `rnn`;
    `torch.nn`, the same around a torch.nn.RNN, LSTM or GRU.

    """

    def __init__(
        self,
        config: RNNLanguageModelConfig,
        *,
        dtype=None,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        normal = nnx.initializers.normal(1.0)
        uniform = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")  # ±1/√in
        self.config = config
        self.embedding = nnx.Embed(
            config.vocab_size,
            config.embedding_features,
            embedding_init=normal,
            rngs=rngs,
            **dtypes,
        )
        self.pos_embedding = (
            nnx.Embed(
                config.context_length,
                config.embedding_features,
                embedding_init=normal,
                rngs=rngs,
                **dtypes,
            )
            if config.context_length is not None
            else None
        )
        self.layers = CELLS[config.cell](
            config.embedding_features,
            config.hidden_features,
            num_layers=config.num_layers,
            dropout_rate=config.dropout_rate,
            rngs=rngs,
            **dtypes,
        )
        self.norm = LayerNorm(config.hidden_features, rngs=rngs, **dtypes)
        self.head = nnx.Linear(
            config.hidden_features, config.vocab_size, kernel_init=uniform, rngs=rngs, **dtypes
        )

    def torch_layouts(self) -> Layouts:
        """The seed's keys around each layout of the recurrence."""
        outside = [
            *embedding("embedding", "embedding"),
            *(
                embedding("pos_embedding", "pos_embedding")
                if self.pos_embedding is not None
                else []
            ),
            *layer_norm("norm", "layer_norm"),
            *linear("head", "proj"),
        ]
        inside = self.layers.torch_layouts()
        names = ["scratch", "torch.nn"] if isinstance(self.layers, RNN) else ["torch.nn"]
        return {
            name: outside + nested(inside[name], "layers", "rnn")
            for name in names
            if name in inside
        }
