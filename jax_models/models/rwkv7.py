"""The RWKV-7 language model."""

__all__ = ["RWKV7LanguageModel", "RWKV7LanguageModelConfig"]

import dataclasses
from typing import ClassVar, Unpack

from jax_models.layers.rwkv7 import RWKV7Block, default_ranks
from jax_models.models.architecture import Checkpoint, Fields
from jax_models.models.language_model import LanguageModel
from jax_models.models.rwkv import BLINKDL, FLA, RWKVConfig, model_parts, small_uniform
from jax_models.options import NormOptions


def _sizes(checkpoint: Checkpoint) -> Fields:
    # A single layer mixes no values.
    mixes_values = checkpoint.has("*.att.v1")
    return {
        "hidden_features": checkpoint.size("*.ffn.key.weight", 0),
        "head_size": checkpoint.size("*.att.r_k", 1),
        "decay_rank": checkpoint.size("*.att.w1", 1),
        "rate_rank": checkpoint.size("*.att.a1", 1),
        "value_rank": checkpoint.size("*.att.v1", 1) if mixes_values else None,
        "gate_rank": checkpoint.size("*.att.g1", 1),
        "keep_unused": checkpoint.has("blocks.0.att.v0"),
    }


def _fla_sizes(checkpoint: Checkpoint) -> Fields:
    mixes_values = checkpoint.has("*.attn.v_lora.lora.0.weight")
    return {
        "hidden_features": checkpoint.size("*.ffn.key.weight", 0),
        "head_size": checkpoint.size("*.attn.r_k", 1),
        "decay_rank": checkpoint.size("*.attn.w_lora.lora.0.weight", 0),
        "rate_rank": checkpoint.size("*.attn.a_lora.lora.0.weight", 0),
        "value_rank": checkpoint.size("*.attn.v_lora.lora.0.weight", 0) if mixes_values else None,
        "gate_rank": checkpoint.size("*.attn.g_lora.lora.0.weight", 0),
        "keep_unused": checkpoint.has("model.layers.0.attn.v_lora.lora.2.bias"),
    }


@dataclasses.dataclass(frozen=True)
class RWKV7LanguageModelConfig(RWKVConfig):
    """The RWKV-7 language model."""

    family: ClassVar = "RWKV-7"
    model_types: ClassVar = ("rwkv7",)
    layouts: ClassVar = {
        "blinkdl": BLINKDL._replace(sizes=_sizes),
        "fla": FLA._replace(sizes=_fla_sizes),
    }
    presets: ClassVar = {"rwkv7": {"recipe": "shakespeare-small-batches"}}

    hidden_features: int | None = None
    """Width of the channel mixes. None: four times `features`."""
    head_size: int = 64
    """Size of each head, a divisor of `features`."""
    decay_rank: int | None = None
    """Width of the data-dependent decay. If this field or one of the next three is None, it is
    chosen as in RWKV-7's training code, where these widths grow with the square root of `features`.
    """
    rate_rank: int | None = None
    """Width of the in-context learning rate."""
    value_rank: int | None = None
    """Width of the mix with the lowest layer's values."""
    gate_rank: int | None = None
    """Width of the gate."""
    keep_unused: bool = False
    """Whether the lowest layer keeps v0, v1 and v2. It does not use them, but some checkpoints
    contain them.
    """

    def __post_init__(self):
        super().__post_init__()
        for name, rank in default_ranks(self.features, vars(self)).items():
            object.__setattr__(self, name, rank)
        object.__setattr__(self, "hidden_features", self.hidden_features or 4 * self.features)

    def build(self, **options: Unpack[NormOptions]) -> "RWKV7LanguageModel":
        return RWKV7LanguageModel(self, **options)


class RWKV7LanguageModel(LanguageModel):
    """Token embedding → RWKV-7 blocks → LayerNorm → Linear.

        >>> model = RWKV7LanguageModelConfig(features=64, num_layers=2).build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

    Args:
        config: the sizes; `RWKV7LanguageModelConfig.from_state_dict` reads them from a checkpoint.
        **options: as for every layer. Parameters are initialized as in RWKV-7.

    Layouts: `blinkdl` (RWKV-LM's checkpoints of RWKV-7), `fla` (flash-linear-attention, whose
    `g_norm` must have ε = 64e-5; its configuration gives this only with heads of size 64).

    """

    def __init__(self, config: RWKV7LanguageModelConfig, **options: Unpack[NormOptions]):
        super().__init__(config, **model_parts(config, RWKV7Block, small_uniform, **options))
