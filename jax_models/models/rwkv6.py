"""The RWKV-6 language model."""

__all__ = ["RWKV6LanguageModel", "RWKV6LanguageModelConfig"]

import dataclasses
from functools import partial
from typing import ClassVar, Unpack

from jax_models.layers.rwkv6 import RWKV6Block, default_hidden_features, default_ranks
from jax_models.models.architecture import Checkpoint, Fields
from jax_models.models.language_model import LanguageModel
from jax_models.models.rwkv import BLINKDL, FLA, HF, RWKVConfig, model_parts, small_uniform
from jax_models.options import NormOptions


def _sizes(attention: str, feed_forward: str, checkpoint: Checkpoint) -> Fields:
    """Reads the sizes under the keys of RWKV-LM, in which the two parts of a block have names."""
    return {
        "hidden_features": checkpoint.size(f"*.{feed_forward}.key.weight", 0),
        "head_size": checkpoint.size(f"*.{attention}.time_faaaa", 1),
        # The matrices of the five mixes are side by side.
        "mix_rank": checkpoint.size(f"*.{attention}.time_maa_w1", 1) // 5,
        "decay_rank": checkpoint.size(f"*.{attention}.time_decay_w1", 1),
    }


def _fla_sizes(checkpoint: Checkpoint) -> Fields:
    return {
        "hidden_features": checkpoint.size("*.ffn.key.linear.weight", 0),
        "head_size": checkpoint.size("*.attn.bonus", 1),
        "mix_rank": checkpoint.size("*.attn.x_proj.2.weight", 1) // 5,
        "decay_rank": checkpoint.size("*.attn.w_proj.linear.lora.0.weight", 0),
    }


@dataclasses.dataclass(frozen=True)
class RWKV6LanguageModelConfig(RWKVConfig):
    """The RWKV-6 language model."""

    family: ClassVar = "RWKV-6"
    model_types: ClassVar = ("rwkv6",)
    layouts: ClassVar = {
        "blinkdl": BLINKDL._replace(sizes=partial(_sizes, "att", "ffn")),
        "fla": FLA._replace(sizes=_fla_sizes),
        "hf": HF._replace(sizes=partial(_sizes, "attention", "feed_forward")),
    }
    presets: ClassVar = {"rwkv6": {"recipe": "shakespeare-small-batches"}}

    hidden_features: int | None = None
    """Width of the channel mixes. None: 3.5 times `features`, rounded down to a multiple of 32."""
    head_size: int = 64
    """Size of each head, a divisor of `features`."""
    mix_rank: int | None = None
    """Width of each data-dependent mix. None: 32, or 64 with at least 4096 features."""
    decay_rank: int | None = None
    """Width of the data-dependent decay. None: 64, or 128 with at least 4096 features."""

    def __post_init__(self):
        super().__post_init__()
        ranks = default_ranks(self.features, self.mix_rank, self.decay_rank)
        hidden_features = self.hidden_features or default_hidden_features(self.features)
        for name, size in zip(("mix_rank", "decay_rank"), ranks, strict=True):
            object.__setattr__(self, name, size)
        object.__setattr__(self, "hidden_features", hidden_features)

    def build(self, **options: Unpack[NormOptions]) -> "RWKV6LanguageModel":
        return RWKV6LanguageModel(self, **options)


class RWKV6LanguageModel(LanguageModel):
    """Token embedding → RWKV-6 blocks → LayerNorm → Linear.

        >>> model = RWKV6LanguageModelConfig(features=64, num_layers=2).build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

    Args:
        config: the sizes; `RWKV6LanguageModelConfig.from_state_dict` reads them from a checkpoint.
        **options: as for every layer. Parameters are initialized as in RWKV-6.

    Layouts: `blinkdl` (RWKV-LM's checkpoints of RWKV-6), `fla` (flash-linear-attention), `hf`
    (RWKV's own repositories at Hugging Face).

    """

    def __init__(self, config: RWKV6LanguageModelConfig, **options: Unpack[NormOptions]):
        super().__init__(config, **model_parts(config, RWKV6Block, small_uniform, **options))
