"""The recurrent language model."""

__all__ = ["RNNLanguageModel", "RNNLanguageModelConfig"]

import dataclasses
import re
from functools import partial
from typing import ClassVar, Literal, Unpack

from flax import nnx

from jax_models.checks.values import Rate
from jax_models.layers.gru import GRU
from jax_models.layers.linear import Linear, torch_uniform
from jax_models.layers.lstm import LSTM
from jax_models.layers.min_rnn import MinGRU, MinLSTM
from jax_models.layers.norm import LayerNorm
from jax_models.layers.rnn import RNN
from jax_models.models.architecture import Checkpoint, Fields, Layout
from jax_models.models.configs import LanguageModelConfig
from jax_models.models.language_model import LanguageModel
from jax_models.options import NormOptions
from jax_models.weights import Layouts, same

CELLS = {"rnn": RNN, "lstm": LSTM, "gru": GRU, "min_gru": MinGRU, "min_lstm": MinLSTM}
SHAKESPEARE = {
    "recipe": "shakespeare",
    "model.embedding_features": 64,
    "model.hidden_features": 256,
}


def _sizes(checkpoint: Checkpoint) -> Fields:
    hidden_features = checkpoint.size("layer_norm.weight", 0, rank=1)
    positions = "pos_embedding.weight"
    cell = "rnn"
    if checkpoint.has("rnn.weight_hh_l0"):  # torch.nn, whose cells differ in the number of gates
        num_gates = checkpoint.size("rnn.weight_hh_l0", 0) // hidden_features
        cell = {1: "rnn", 3: "gru", 4: "lstm"}.get(num_gates)
    if checkpoint.has("rnn.layers.0.linear_z.weight"):
        cell = "min_gru"
    if checkpoint.has("rnn.layers.0.linear_f.weight"):
        cell = "min_lstm"
    # Count the layers of torch.nn or of a minimal recurrence. Others have a single layer.
    layers = (re.match(r"rnn\.(?:weight_hh_l|layers\.)(\d+)", key) for key in checkpoint.weights)
    return {
        "context_length": checkpoint.size(positions, 0) if checkpoint.has(positions) else None,
        "embedding_features": checkpoint.features,
        "hidden_features": hidden_features,
        "cell": cell,
        "num_layers": len({layer[1] for layer in layers if layer}) or 1,
    }


@dataclasses.dataclass(frozen=True)
class RNNLanguageModelConfig(LanguageModelConfig):
    """The config of a recurrent language model."""

    family: ClassVar = "RNN"
    layouts: ClassVar = dict.fromkeys(
        ("scratch", "torch.nn", "minimal"),
        Layout(
            "embedding.weight",
            "rnn",
            "layer_norm.weight",
            "proj.weight",
            positions=same("pos_embedding.embedding", "pos_embedding.weight"),
            sizes=_sizes,
        ),
    )
    presets: ClassVar = {
        "all-work": {"recipe": "all-work", "model.context_length": 8},
        "lstm": {**SHAKESPEARE, "model.cell": "lstm"},
        "gru": {**SHAKESPEARE, "model.cell": "gru"},
        "rnn": {
            **SHAKESPEARE,
            "model.cell": "rnn",
            "optimizer.learning_rate": 1e-3,
            "optimizer.clip_norm": 1.0,
        },
        "min-gru": {**SHAKESPEARE, "model.cell": "min_gru", "model.num_layers": 3},
    }
    """A quick first run for newcomers, and runs of several cells on Tiny Shakespeare."""

    vocab_size: int = 20
    """Number of distinct tokens."""
    context_length: int | None = None
    """The longest sequence: the number of position embeddings. None: no positions, and no limit."""
    embedding_features: int = 10
    """Size of the token and position embeddings."""
    hidden_features: int = 20
    """Size of the hidden state."""
    cell: Literal["rnn", "lstm", "gru", "min_gru", "min_lstm"] = "rnn"
    """The kind of recurrence."""
    num_layers: int = 1
    """Number of layers of the recurrence."""
    dropout_rate: Rate = 0.0
    """Rate of the dropout between the layers."""

    def build(self, **options: Unpack[NormOptions]) -> "RNNLanguageModel":
        return RNNLanguageModel(self, **options)


class RNNLanguageModel(LanguageModel):
    """Token and position embeddings → a recurrence → LayerNorm → Linear.

        >>> model = RNNLanguageModelConfig().build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

    The recurrence is an RNN, LSTM, GRU, minGRU or minLSTM.

    Args:
        config: the sizes.
        **options: as for every layer.

    Layouts: `scratch` (torch_ref.RNNLanguageModel, if the recurrence is one layer of `rnn`),
    `torch.nn` (the same model with a torch.nn.RNN, LSTM or GRU), `minimal` (the same model with
    torch_ref's MinGRU or MinLSTM).

    """

    def __init__(self, config: RNNLanguageModelConfig, **options: Unpack[NormOptions]):
        embed = partial(
            nnx.Embed,
            features=config.embedding_features,
            embedding_init=nnx.initializers.normal(1.0),
            **options,
        )
        length, hidden_features = config.context_length, config.hidden_features
        super().__init__(
            config,
            embedding=embed(config.vocab_size),
            pos_embedding=None if length is None else embed(length),
            blocks=config.make(
                CELLS[config.cell], in_features=config.embedding_features, **options
            ),
            norm=LayerNorm(hidden_features, **options),
            head=Linear(
                hidden_features,
                config.vocab_size,
                kernel_init=torch_uniform(hidden_features),
                **options,
            ),
        )

    def torch_layouts(self) -> Layouts:
        """The layouts of the recurrence, each with the other keys of torch_ref.RNNLanguageModel."""
        layouts = super().torch_layouts()
        if not isinstance(self.blocks, RNN):
            layouts.pop("scratch", None)  # the twin uses the LSTM and GRU of torch.nn
        return layouts
