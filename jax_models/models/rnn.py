"""The recurrent language model."""

import dataclasses
from typing import Literal, Unpack

import jax.numpy as jnp
from flax import nnx

from jax_models.layers.gru import GRU
from jax_models.layers.linear import Linear, torch_uniform
from jax_models.layers.lstm import LSTM
from jax_models.layers.min_rnn import MinGRU, MinLSTM
from jax_models.layers.norm import LayerNorm
from jax_models.layers.rnn import RNN
from jax_models.models.language_model import BuildOptions, LanguageModel, LanguageModelConfig
from jax_models.ops.checks import checked_rate
from jax_models.options import FloatingDtype
from jax_models.weights import Layouts, embedding, layer_norm, linear, nested

CELLS = {"rnn": RNN, "lstm": LSTM, "gru": GRU, "min_gru": MinGRU, "min_lstm": MinLSTM}


@dataclasses.dataclass(frozen=True)
class RNNLanguageModelConfig(LanguageModelConfig):
    """A recurrent language model."""

    vocab_size: int = 20
    """Number of distinct tokens."""
    context_length: int | None = None
    """Number of positions that the model has. None: no positions, and no limit."""
    embedding_features: int = 10
    """Size of the token and position embeddings."""
    hidden_features: int = 20
    """Size of the hidden state."""
    cell: Literal["rnn", "lstm", "gru", "min_gru", "min_lstm"] = "rnn"
    """The recurrence."""
    num_layers: int = 1
    """Number of layers of the recurrence."""
    dropout_rate: float = 0.0
    """Dropout between the layers."""

    def __post_init__(self):
        """Refuse sizes, cells and rates that there are not."""
        super().__post_init__()
        checked_rate("dropout_rate", self.dropout_rate)

    def build(self, **options: Unpack[BuildOptions]) -> "RNNLanguageModel":
        """The model of this config."""
        return RNNLanguageModel(self, **options)


class RNNLanguageModel(LanguageModel):
    """Token and position embeddings → a recurrence → LayerNorm → Linear.

        >>> model = RNNLanguageModelConfig().build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

    The recurrence is an RNN, LSTM, GRU, minGRU or minLSTM.

    Args:
        config: the sizes.
        dtype: of the computation; by default the parameters'.
        param_dtype: of the parameters.
        rngs: draws the parameters (`params`) and the dropout masks (`dropout`).

    Layouts: `scratch`, the keys of torch_ref.RNNLanguageModel, if the cell is one layer of `rnn`;
    `torch.nn`, the same around a torch.nn.RNN, LSTM or GRU; `minimal`, around torch_ref's MinGRU
    or MinLSTM.

    """

    def __init__(
        self,
        config: RNNLanguageModelConfig,
        *,
        dtype: FloatingDtype | None = None,
        param_dtype: FloatingDtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        dtypes = {"dtype": dtype, "param_dtype": param_dtype}
        normal = nnx.initializers.normal(1.0)
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
        self.head = Linear(
            config.hidden_features,
            config.vocab_size,
            kernel_init=torch_uniform(config.hidden_features),
            rngs=rngs,
            **dtypes,
        )

    def torch_layouts(self) -> Layouts:
        """The keys of torch_ref.RNNLanguageModel around each layout of the recurrence."""
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
        names = ["scratch", "torch.nn"] if isinstance(self.layers, RNN) else [*inside][:1]
        return {
            name: outside + nested(inside[name], "layers", "rnn")
            for name in names
            if name in inside
        }
