"""AI21's Jamba: Mamba, attention without positions, and experts in some of the blocks."""

__all__ = ["JambaLanguageModel", "JambaLanguageModelConfig"]

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Unpack

from flax import nnx

from jax_models.layers.experts import Experts
from jax_models.layers.mamba import Mamba
from jax_models.models.architecture import Checkpoint, Fields
from jax_models.models.hf import kinds_by_key
from jax_models.models.hybrid import (
    BALANCE_FIELDS,
    FULL,
    LINEAR,
    BalancedExpertsConfig,
    BlockKeys,
    ExpertsKeys,
    HybridConfig,
    HybridLanguageModel,
    attention_sizes,
    experts_sizes,
    model_layouts,
)
from jax_models.options import Index, NormOptions
from jax_models.sequence import SequenceLayer

ROUTER = "feed_forward.router.weight"
EXPERTS = ExpertsKeys(
    ROUTER,
    "feed_forward.experts.gate_up_proj",
    "feed_forward.experts.gate_up_proj",
    "feed_forward.experts.down_proj",
)
"""The keys of the experts in a `state_dict`."""
FILE_EXPERTS = ExpertsKeys(
    ROUTER,
    "feed_forward.experts.{}.gate_proj.weight",
    "feed_forward.experts.{}.up_proj.weight",
    "feed_forward.experts.{}.down_proj.weight",
)
"""The keys of the experts in a saved file."""


def _block_keys(experts: ExpertsKeys) -> dict[str, BlockKeys]:
    norms = "input_layernorm", "pre_ff_layernorm"
    return {
        LINEAR: BlockKeys("mamba", *norms, "mamba", "feed_forward", experts=experts),
        FULL: BlockKeys("self_attn", *norms, "llama", "feed_forward", experts=experts),
    }


def period_and_offset(numbers: Sequence[int], count: int) -> tuple[int, int]:
    """The smallest period, and the offset, for which these numbers have `i % period == offset`.

    They are below `count`. If they have no period, the result describes other numbers.
    """
    first, second, *_ = *numbers, count, count
    return max(first + 1, second - first), first


def _sizes(experts: ExpertsKeys, checkpoint: Checkpoint) -> Fields:
    # The experts are as wide as the MLPs.
    down = "*.feed_forward.down_proj.weight"
    if not checkpoint.has(down) and checkpoint.has(f"*.{ROUTER}"):
        down = f"*.{experts.down.format(0)}"
    fields = {
        "mlp_features": checkpoint.size(down, -1),
        **experts_sizes(checkpoint, experts),
        "block_types": kinds_by_key(checkpoint, "*.mamba.A_log", LINEAR, FULL),
        **attention_sizes(checkpoint, "self_attn"),
        "tied_head": checkpoint.tied_head,
    }
    numbers = [i for i, there in enumerate(checkpoint.in_blocks(f"*.{ROUTER}")) if there]
    if numbers:
        period, offset = period_and_offset(numbers, len(checkpoint.numbers))
        fields |= {"experts_period": period, "experts_offset": offset}
    if not checkpoint.has("*.mamba.A_log"):
        return fields
    return fields | {
        "inner_features": checkpoint.size("*.mamba.A_log", 0, rank=2),
        "state_features": checkpoint.size("*.mamba.A_log", 1, rank=2),
        "dt_rank": checkpoint.size("*.mamba.dt_proj.weight", 1, rank=2),
        "kernel_size": checkpoint.size("*.mamba.conv1d.weight", 2, rank=3),
        "mamba_bias": checkpoint.has("*.mamba.in_proj.bias"),
        "conv_bias": checkpoint.has("*.mamba.conv1d.bias"),
    }


SIZES, FILE_SIZES = partial(_sizes, EXPERTS), partial(_sizes, FILE_EXPERTS)
STATE_DICT, FILE = model_layouts("model", "final_layernorm", SIZES, FILE_SIZES)
HF_FIELDS = HybridConfig.hf_fields | {
    "mamba_d_state": "state_features",
    "mamba_d_conv": "kernel_size",
    "mamba_dt_rank": "dt_rank",
    "mamba_proj_bias": "mamba_bias",
    "mamba_conv_bias": "conv_bias",
    "num_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "expert_layer_period": "experts_period",
    "expert_layer_offset": "experts_offset",
    **BALANCE_FIELDS,
}


@dataclasses.dataclass(frozen=True)
class JambaLanguageModelConfig(BalancedExpertsConfig):
    """The config of Jamba. Except for the sizes, the defaults are those of transformers.

    By default, there are no experts.
    """

    family: ClassVar = "Jamba"
    presets: ClassVar = {"jamba": {}}
    model_types: ClassVar = ("jamba",)
    marks: ClassVar = (".mamba.x_proj.",)
    kinds: ClassVar = (LINEAR, FULL)
    block_keys: ClassVar = {"hf": _block_keys(EXPERTS), "hf-file": _block_keys(FILE_EXPERTS)}
    float32_keys: ClassVar = tuple(f".mamba.{name}" for name in ("A_log", "D", "dt_proj.bias"))
    layouts: ClassVar = {"hf": STATE_DICT, "hf-file": FILE}
    hf_class: ClassVar = "JambaForCausalLM"
    hf_fields: ClassVar = {name: ours for name, ours in HF_FIELDS.items() if name != "rope_theta"}
    hf_values: ClassVar = {
        "hidden_act": ("silu", "swish"),
        "attention_dropout": (0,),
        "tie_word_embeddings": (False, True),
    }
    hf_defaults: ClassVar = {
        "num_key_value_heads": 8,
        "num_experts": 16,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": "auto",
    }

    block_types: tuple[str, ...] = (LINEAR,) * 3 + (FULL,)
    """The kinds of the blocks, from the lowest up. The pattern repeats."""
    rope_theta: ClassVar = None  # pyright: ignore[reportIncompatibleVariableOverride]
    inner_features: int = 384
    """Number of channels of a Mamba."""
    state_features: int = 16
    """Size of the state of each channel."""
    dt_rank: int = 12
    """Size of the projection from which Δ is computed."""
    kernel_size: int = 4
    """Number of taps of the causal convolutions."""
    mamba_bias: bool = False
    """Whether the first and the last projection of a Mamba have biases."""
    conv_bias: bool = True
    """Whether the convolutions have biases."""
    num_experts: Index = 0
    """Number of experts in a block, each as wide as an MLP. 0 or 1: all blocks have MLPs."""
    expert_features: ClassVar = property(lambda self: self.mlp_features)  # pyright: ignore[reportIncompatibleVariableOverride, reportAssignmentType]
    experts_period: int = 2
    """The blocks i with `i % experts_period == experts_offset` have experts instead of MLPs."""
    experts_offset: Index = 1
    """The lowest block with experts."""

    def __post_init__(self):
        super().__post_init__()
        if self.experts_offset >= self.experts_period:
            raise ValueError(
                f"experts_offset: expected less than experts_period = {self.experts_period}, got "
                f"{self.experts_offset}"
            )

    def build(self, **options: Unpack[NormOptions]) -> "JambaLanguageModel":
        return JambaLanguageModel(self, **options)

    @classmethod
    def converted(cls, given: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """Fills in sizes that depend on others."""
        features, rank = given["hidden_size"], given["mamba_dt_rank"]
        return super().converted(given, config) | {
            "inner_features": given["mamba_expand"] * features,
            "dt_rank": math.ceil(features / 16) if rank == "auto" else rank,
        }

    @classmethod
    def layer_types(cls, given: Mapping[str, Any]) -> Any:
        """The kind of each block: attention in one of each period."""
        period, offset = (given[f"attn_layer_{name}"] for name in ("period", "offset"))
        if not 0 <= offset < period:
            raise ValueError(
                "config: attn_layer_offset: expected at least 0 and less than attn_layer_period = "
                f"{period}, got {offset}"
            )
        return [cls.kinds[i % period == offset] for i in range(given["num_hidden_layers"])]

    def to_hf(self) -> dict[str, Any]:
        """Returns the config.json, which has the period of the blocks with attention."""
        fields = super().to_hf()
        del fields["rope_parameters"]
        types = fields.pop("layer_types")
        period, offset = period_and_offset(
            [i for i, kind in enumerate(types) if kind == FULL], self.num_layers
        )
        place = {"attn_layer_period": period, "attn_layer_offset": offset}
        if self.layer_types({**fields, **place}) != types:
            raise ValueError(
                "block_types: expected attention in one block of each period, as in transformers, "
                f"got {self.block_types}"
            )
        return fields | place | {"mamba_expand": self.expansion("inner_features")}

    def has_experts(self, number: int) -> bool:
        return self.num_experts > 1 and number % self.experts_period == self.experts_offset

    def experts(self, **options: Any) -> Experts:
        return super().experts(normalize=False, **options)

    def attention(self, **options: Any) -> SequenceLayer:
        return super().attention(rotary_features=0, rope_theta=None, epsilon=None, **options)

    def mixer(self, **options: Any) -> Mamba:
        zeros = nnx.initializers.zeros
        return self.make(Mamba, use_bias=self.mamba_bias, norm="scaled", dt_init=zeros, **options)


class JambaLanguageModel(HybridLanguageModel):
    """Token embedding → blocks with Mamba or attention → RMSNorm → head.

        >>> model = JambaLanguageModelConfig(features=64, num_heads=2).build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

        x ← x + mixer(norm(x)),   x ← x + mlp(norm(x))

    The mixer is a `Mamba` that norms δ, B and C, or in some blocks an `Attention` without
    positions. The MLP is a `GatedMLP` with silu. With `num_experts`, one block of each
    `experts_period` has a mixture of `Experts` instead. The weights of a token's experts are the
    softmax over all experts. The head is the token embedding, or a matrix of its own.

    Args:
        config: the sizes. `JambaLanguageModelConfig.from_hf` reads them from a config.json.
        **options: as for every layer. Matrices and convolutions are drawn from a normal
            distribution, `dt_bias` is zero, and the other parameters start as in `Mamba`, as in
            transformers.

    Layouts: `hf` (transformers' JambaForCausalLM) and `hf-file` (the files that it saves and that
    AI21 published, in which experts have other keys, and which lack `lm_head.weight` if the head is
    tied).

    """

    config: JambaLanguageModelConfig
