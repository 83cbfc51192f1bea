"""The RWKV-7 language model."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import jax.numpy as jnp
from flax import nnx

from jax_models.layers.rwkv7 import RWKV7Block, default_ranks
from jax_models.layers.rwkv_version import foreign_to
from jax_models.models.language_model import BuildOptions
from jax_models.models.rwkv import RWKVConfig, RWKVSkeleton, Size, Sizes, small_uniform
from jax_models.options import FloatingDtype
from jax_models.sequence import SequenceLayer

RANKS = {"decay_rank": "w", "rate_rank": "a", "value_rank": "v", "gate_rank": "g"}


@dataclasses.dataclass(frozen=True)
class RWKV7LanguageModelConfig(RWKVConfig):
    """The RWKV-7 language model."""

    version: ClassVar[str] = "RWKV-7"
    sizes: ClassVar[Sizes] = {
        "blinkdl": {
            "vocab_size": Size("emb.weight", 0),
            "features": Size("emb.weight", 1),
            "hidden_features": Size("blocks.0.ffn.key.weight", 0),
            "head_size": Size("blocks.0.att.r_k", 1),
            "decay_rank": Size("blocks.0.att.w1", 1),
            "rate_rank": Size("blocks.0.att.a1", 1),
            "value_rank": Size("blocks.1.att.v1", 1),
            "gate_rank": Size("blocks.0.att.g1", 1),
        },
        "fla": {
            "vocab_size": Size("model.embeddings.weight", 0),
            "features": Size("model.embeddings.weight", 1),
            "hidden_features": Size("model.layers.0.ffn.key.weight", 0),
            "head_size": Size("model.layers.0.attn.r_k", 1),
            "decay_rank": Size("model.layers.0.attn.w_lora.lora.0.weight", 0),
            "rate_rank": Size("model.layers.0.attn.a_lora.lora.0.weight", 0),
            "value_rank": Size("model.layers.1.attn.v_lora.lora.0.weight", 0),
            "gate_rank": Size("model.layers.0.attn.g_lora.lora.0.weight", 0),
        },
    }

    vocab_size: int = 256
    """Number of distinct tokens."""
    features: int = 192
    """Width of the model."""
    num_layers: int = 3
    """Residual blocks."""
    hidden_features: int | None = None
    """Width of the channel mixes. None: four times `features`."""
    head_size: int = 64
    """Size of each head; it divides `features`."""
    decay_rank: int | None = None
    """Width of the data-dependent decay. If this or one of the next three is None, it is as in
    RWKV-7's training code, where they grow with the square root of `features`."""
    rate_rank: int | None = None
    """Width of the in-context learning rate."""
    value_rank: int | None = None
    """Width of the mix with the lowest layer's values."""
    gate_rank: int | None = None
    """Width of the gate."""
    keep_unused: bool = False
    """The lowest layer keeps v0, v1 and v2, which it does not use; some checkpoints have them."""

    def __post_init__(self):
        """Refuse what the annotations do not allow, and say what None stands for."""
        super().__post_init__()
        ranks = default_ranks(self.features, *(getattr(self, name) for name in RANKS))
        for name, rank in zip(RANKS, ranks, strict=True):
            object.__setattr__(self, name, rank)
        object.__setattr__(self, "hidden_features", self.hidden_features or 4 * self.features)

    @classmethod
    def optional(cls, num_layers: int) -> tuple[str, ...]:
        """A single layer mixes its values with no other's."""
        return ("value_rank",) if num_layers == 1 else ()

    @classmethod
    def options(cls, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Are there weights that the lowest layer does not use?"""
        unused = ("blocks.0.att.v0", "model.layers.0.attn.v_lora.lora.2.bias")
        return {"keep_unused": any(key in state_dict for key in unused)}

    def build(self, **options: Unpack[BuildOptions]) -> "RWKV7LanguageModel":
        """The model of this config."""
        return RWKV7LanguageModel(self, **options)


class RWKV7LanguageModel(RWKVSkeleton):
    """Token embedding → RWKV-7 blocks → LayerNorm → Linear.

        >>> model = RWKV7LanguageModelConfig(features=64, num_layers=2).build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

    Args:
        config: the sizes; `RWKV7LanguageModelConfig.from_state_dict` reads them from a checkpoint.
        dtype: of the computation; by default the parameters'.
        param_dtype: of the parameters.
        rngs: draws the parameters, as RWKV-7 does.

    Layouts: `blinkdl` (RWKV-LM's checkpoints of RWKV-7), `fla` (flash-linear-attention).

    """

    foreign_format = staticmethod(foreign_to("RWKV-7"))

    def __init__(
        self,
        config: RWKV7LanguageModelConfig,
        *,
        dtype: FloatingDtype | None = None,
        param_dtype: FloatingDtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        ranks = {name: getattr(config, name) for name in RANKS}
        blocks: list[SequenceLayer] = [
            RWKV7Block(
                config.features,
                config.hidden_features,
                head_size=config.head_size,
                keep_unused=config.keep_unused,
                layer_index=index,
                num_layers=config.num_layers,
                **ranks,
                **options,
            )
            for index in range(config.num_layers)
        ]
        super().__init__(config, blocks, embedding_init=small_uniform, **options)

    def read_out(self, x):
        """The features, without the lowest layer's values beside them."""
        return x[..., : self.embedding.features]
