"""The GPT-like language model of "The Annotated Hyena", over Hyena or attention."""

__all__ = ["GPModel", "GPModelConfig"]

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Unpack

from flax import nnx

from jax_models.checks.values import Rate
from jax_models.layers.dropout import Dropout
from jax_models.layers.hyena import AuthenticHyenaBlock, HyenaBlock
from jax_models.layers.norm import LayerNorm
from jax_models.layers.self_attention import SelfAttentionBlock
from jax_models.models.architecture import Checkpoint, Fields, Layout
from jax_models.models.configs import StackConfig
from jax_models.models.language_model import LanguageModel
from jax_models.options import NormOptions
from jax_models.sequence import SequenceLayer
from jax_models.weights import squeezed

Block = Literal["hyena", "authentic-hyena", "attention"]
BLOCKS: dict[Block, type[SequenceLayer]] = {
    "hyena": HyenaBlock,
    "authentic-hyena": AuthenticHyenaBlock,
    "attention": SelfAttentionBlock,
}


def _sizes(checkpoint: Checkpoint) -> Fields:
    fields: dict[str, Any] = {"context_length": checkpoint.size("pos_emb", 1, rank=3)}
    if checkpoint.has("*.self_attn.attn.in_proj_weight"):
        return fields | {"block": "attention", "num_heads": checkpoint.given("num_heads")}
    fields |= {
        "block": "hyena",
        "order": checkpoint.size("*.B", 0, rank=4),
        "kernel_size": checkpoint.size("*.proj_input.conv.weight", 2, rank=3),
    }
    if not checkpoint.has("*.filter.mlp.0.weight"):
        return fields
    # Count the linear layers of the filter network of the lowest block.
    weight = re.compile(r"layers\.0\.filter\.mlp\.\d+\.weight")
    return fields | {
        "block": "authentic-hyena",
        "embed_features": checkpoint.size("*.filter.mlp.0.weight", 1),
        "mlp_features": checkpoint.size("*.filter.mlp.0.weight", 0),
        "num_filter_layers": sum(weight.fullmatch(key) is not None for key in checkpoint.weights),
        "implicit": checkpoint.given("implicit"),
    }


HYENA = {
    "recipe": "annotated-hyena",
    "model.embedding_dropout_rate": 0.2,
    "optimizer.learning_rate": 6e-4,
    "optimizer.weight_decay": 0.4,
}
ATTENTION = HYENA | {
    "model.block": "attention",
    "model.features": 384,
    "model.block_dropout_rate": 0.2,
    "optimizer.learning_rate": 3e-4,
    "optimizer.weight_decay": 0.1,
}
AUTHENTIC = HYENA | {
    "model.block": "authentic-hyena",
    "model.num_layers": 2,
    "optimizer.weight_decay": 1.0,
    "num_epochs": 10.0,
}


def _small(preset: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """A smaller model, which is trained faster: in fewer epochs, with a larger learning rate."""
    return {
        **preset,
        "recipe": "annotated-hyena-small",
        "model.features": 192,
        "model.num_layers": num_layers,
        "optimizer.learning_rate": 5 * preset["optimizer.learning_rate"],
        "num_epochs": 3.0,
    }


@dataclasses.dataclass(frozen=True)
class GPModelConfig(StackConfig):
    """The config of The Annotated Hyena's GPT-like model, by default with its simple Hyena."""

    family: ClassVar = "The Annotated Hyena"
    layouts: ClassVar = {
        "annotated-hyena": Layout(
            "tok_emb.weight",
            "layers",
            "ln.weight",
            "head.weight",
            positions=squeezed("pos_embedding.embedding", "pos_emb", (0,)),
            sizes=_sizes,
        )
    }
    presets: ClassVar = {
        "annotated-hyena": HYENA,
        "annotated-hyena-small": _small(HYENA, num_layers=3),
        "annotated-attention": ATTENTION,
        "annotated-attention-small": _small(ATTENTION, num_layers=3),
        "authentic-hyena": AUTHENTIC,
        "authentic-hyena-small": _small(AUTHENTIC, num_layers=2),
    }
    """The experiments of The Annotated Hyena, each with a `-small` version for two cores."""

    vocab_size: int = 65
    """Number of distinct tokens."""
    context_length: int = 128
    """The longest sequence: the number of position embeddings."""
    features: int = 386
    """Width of the model."""
    num_layers: int = 6
    """Number of blocks."""
    block: Block = "hyena"
    """The kind of block."""
    order: int = 2
    """Number of long convolutions in a Hyena block."""
    kernel_size: int = 3
    """Number of taps of a Hyena block's short convolution."""
    embed_features: int = 33
    """Authentic Hyena: size of the position embedding in the filter network."""
    mlp_features: int = 64
    """Authentic Hyena: width of the filter network."""
    num_filter_layers: int = 4
    """Authentic Hyena: number of linear layers of the filter network."""
    omega: float = 12.0
    """Authentic Hyena: frequency of the filter network's sines."""
    implicit: bool = True
    """Authentic Hyena: whether a network computes the filters, as the text of The Annotated Hyena
    describes. If False, the filters are trained directly, as in its code.
    """
    num_heads: int = 6
    """Number of heads of the attention."""
    block_dropout_rate: Rate = 0.0
    """Rate of the dropout in the blocks."""
    embedding_dropout_rate: Rate = 0.0
    """Rate of the dropout of the embeddings."""

    def build(self, **options: Unpack[NormOptions]) -> "GPModel":
        return GPModel(self, **options)


class GPModel(LanguageModel):
    """Token and position embeddings → dropout → blocks → LayerNorm → the token embedding again.

        >>> model = GPModelConfig(features=64, num_layers=2).build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

        logits = norm(blocks(dropout(E[tokens] + pos_embedding))) Eᵀ

    `generate` and `stream` use the carried state until the text has context_length tokens, and then
    run over the last context_length tokens. The Annotated Hyena has no such sliding window.

    Args:
        config: the sizes and the kind of block.
        **options: as for every layer. The embeddings are drawn from a normal distribution.

    Layouts: `annotated-hyena` (torch_ref.GPModel; the tied `head.weight` must equal
    `tok_emb.weight`).

    """

    def __init__(self, config: GPModelConfig, **options: Unpack[NormOptions]):
        init = nnx.initializers.normal(1.0)
        features, length = config.features, config.context_length
        super().__init__(
            config,
            embedding=nnx.Embed(config.vocab_size, features, embedding_init=init, **options),
            pos_embedding=nnx.Embed(length, features, embedding_init=init, **options),
            dropout=Dropout(config.embedding_dropout_rate, rngs=options["rngs"]),
            blocks=[
                config.make(
                    BLOCKS[config.block],
                    max_length=length,
                    dropout_rate=config.block_dropout_rate,
                    **options,
                )
                for _ in range(config.num_layers)
            ],
            norm=LayerNorm(features, **options),
        )
