"""The RWKV-6 language model."""

import dataclasses
from typing import Any, ClassVar, Unpack

import jax.numpy as jnp
from flax import nnx

from jax_models.layers.rwkv6 import RWKV6Block, default_hidden_features, default_ranks
from jax_models.layers.rwkv_version import foreign_to
from jax_models.models.language_model import BuildOptions
from jax_models.models.rwkv import RWKVConfig, RWKVSkeleton, Size, Sizes, small_uniform
from jax_models.options import FloatingDtype
from jax_models.sequence import SequenceLayer


def _as_in_blinkdl(emb: str, attention: str, feed_forward: str) -> dict[str, Size]:
    return {
        "vocab_size": Size(emb, 0),
        "features": Size(emb, 1),
        "hidden_features": Size(f"{feed_forward}.key.weight", 0),
        "head_size": Size(f"{attention}.time_faaaa", 1),
        "mix_rank": Size(f"{attention}.time_maa_w1", 1, parts=5),
        "decay_rank": Size(f"{attention}.time_decay_w1", 1),
    }


@dataclasses.dataclass(frozen=True)
class RWKV6LanguageModelConfig(RWKVConfig):
    """The RWKV-6 language model."""

    version: ClassVar[str] = "RWKV-6"
    sizes: ClassVar[Sizes] = {
        "blinkdl": _as_in_blinkdl("emb.weight", "blocks.0.att", "blocks.0.ffn"),
        "hf": _as_in_blinkdl(
            "rwkv.embeddings.weight", "rwkv.blocks.0.attention", "rwkv.blocks.0.feed_forward"
        ),
        "fla": {
            "vocab_size": Size("model.embeddings.weight", 0),
            "features": Size("model.embeddings.weight", 1),
            "hidden_features": Size("model.layers.0.ffn.key.linear.weight", 0),
            "head_size": Size("model.layers.0.attn.bonus", 1),
            "mix_rank": Size("model.layers.0.attn.x_proj.2.weight", 1, parts=5),
            "decay_rank": Size("model.layers.0.attn.w_proj.linear.lora.0.weight", 0),
        },
    }

    vocab_size: int = 256
    """Number of distinct tokens."""
    features: int = 192
    """Width of the model."""
    num_layers: int = 3
    """Residual blocks."""
    hidden_features: int | None = None
    """Width of the channel mixes. None: 3.5 times `features`, rounded down to a multiple of 32."""
    head_size: int = 64
    """Size of each head; it divides `features`."""
    mix_rank: int | None = None
    """Width of each data-dependent mix. None: 32, or 64 from 4096 features."""
    decay_rank: int | None = None
    """Width of the data-dependent decay. None: 64, or 128 from 4096 features."""

    def __post_init__(self):
        """Refuse what the annotations do not allow, and say what None stands for."""
        super().__post_init__()
        ranks = default_ranks(self.features, self.mix_rank, self.decay_rank)
        hidden_features = self.hidden_features or default_hidden_features(self.features)
        for name, size in zip(("mix_rank", "decay_rank"), ranks, strict=True):
            object.__setattr__(self, name, size)
        object.__setattr__(self, "hidden_features", hidden_features)

    def build(self, **options: Unpack[BuildOptions]) -> "RWKV6LanguageModel":
        """The model of this config."""
        return RWKV6LanguageModel(self, **options)


class RWKV6LanguageModel(RWKVSkeleton):
    """Token embedding → RWKV-6 blocks → LayerNorm → Linear.

        >>> model = RWKV6LanguageModelConfig(features=64, num_layers=2).build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

    Args:
        config: the sizes; `RWKV6LanguageModelConfig.from_state_dict` reads them from a checkpoint.
        dtype: of the computation; by default the parameters'.
        param_dtype: of the parameters.
        rngs: draws the parameters, as RWKV-6 does.

    Layouts: `blinkdl` (RWKV-LM's checkpoints of RWKV-6), `fla` (flash-linear-attention), `hf`
    (RWKV's own repositories at Hugging Face).

    """

    foreign_format = staticmethod(foreign_to("RWKV-6"))

    def __init__(
        self,
        config: RWKV6LanguageModelConfig,
        *,
        dtype: FloatingDtype | None = None,
        param_dtype: FloatingDtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        blocks: list[SequenceLayer] = [
            RWKV6Block(
                config.features,
                config.hidden_features,
                head_size=config.head_size,
                mix_rank=config.mix_rank,
                decay_rank=config.decay_rank,
                layer_index=index,
                num_layers=config.num_layers,
                **options,
            )
            for index in range(config.num_layers)
        ]
        super().__init__(config, blocks, embedding_init=small_uniform, **options)
