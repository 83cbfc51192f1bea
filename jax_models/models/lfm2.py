"""Liquid AI's LFM2: gated short convolutions and attention, also with experts."""

__all__ = ["LFM2LanguageModel", "LFM2LanguageModelConfig"]

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Unpack

from flax import nnx

from jax_models.checks.values import Positive
from jax_models.layers.attention import Attention
from jax_models.layers.experts import Experts
from jax_models.layers.mlp import GatedMLP
from jax_models.layers.short_convolution import ShortConvolution
from jax_models.models.architecture import Checkpoint, Fields, Mark
from jax_models.models.hf import HFModel, kinds_by_key
from jax_models.models.hybrid import (
    FULL,
    BlockKeys,
    ExpertsKeys,
    HybridConfig,
    HybridLanguageModel,
    SigmoidExpertsConfig,
    attention_sizes,
    experts_sizes,
    model_layouts,
)
from jax_models.options import Index, NormOptions
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, layouts_of, linear, nested, parts

PROJECTIONS = ("w1", "w3", "w2")
LATER_PARTS = (".post_operator_norm.", ".self_attn.q_norm.")
"""Parts of the keys of LFM3, which LFM2 lacks."""
ROUTER, EXPERT_BIAS = "feed_forward.gate.weight", "feed_forward.expert_bias"
EXPERTS = ExpertsKeys(
    ROUTER,
    "feed_forward.experts.gate_up_proj",
    "feed_forward.experts.gate_up_proj",
    "feed_forward.experts.down_proj",
    EXPERT_BIAS,
)
"""The keys of the experts in a `state_dict`."""
FILE_EXPERTS = ExpertsKeys(
    ROUTER,
    "feed_forward.experts.{}.w1.weight",
    "feed_forward.experts.{}.w3.weight",
    "feed_forward.experts.{}.w2.weight",
    EXPERT_BIAS,
)
"""The keys of the experts in a saved file."""


def _block_keys(experts: ExpertsKeys) -> dict[str, BlockKeys]:
    keys = ("operator_norm", "ffn_norm", "lfm2", "feed_forward", PROJECTIONS, experts)
    return {"conv": BlockKeys("conv", *keys), FULL: BlockKeys("self_attn", *keys)}


def conv_sizes(checkpoint: Checkpoint, norm: str) -> Fields:
    """Reads the fields of a `ConvConfig`. The norm of the attention's queries has this name."""
    fields = {
        "block_types": kinds_by_key(checkpoint, "*.conv.in_proj.weight", "conv", FULL),
        **attention_sizes(checkpoint, "self_attn", norm),
        "tied_head": checkpoint.tied_head,
    }
    if checkpoint.has("*.feed_forward.w1.weight"):
        fields["mlp_features"] = checkpoint.size("*.feed_forward.w1.weight", 0)
    if checkpoint.has("*.conv.conv.weight"):
        fields["kernel_size"] = checkpoint.size("*.conv.conv.weight", 2, rank=3)
        fields["conv_bias"] = checkpoint.has("*.conv.conv.bias")
    return fields


def _sizes(experts: ExpertsKeys, checkpoint: Checkpoint) -> Fields:
    fields = {
        **conv_sizes(checkpoint, "q_layernorm"),
        **experts_sizes(checkpoint, experts),
        "use_expert_bias": checkpoint.has(f"*.{EXPERT_BIAS}"),
    }
    if fields["num_experts"]:
        fields["num_dense_layers"] = checkpoint.in_blocks(f"*.{ROUTER}").count(False)
    return fields


SIZES, FILE_SIZES = partial(_sizes, EXPERTS), partial(_sizes, FILE_EXPERTS)
STATE_DICT, FILE = model_layouts("model", "embedding_norm", SIZES, FILE_SIZES)
HF_FIELDS = {
    {"rms_norm_eps": "norm_eps"}.get(name, name): ours
    for name, ours in HybridConfig.hf_fields.items()
} | {"conv_L_cache": "kernel_size", "conv_bias": "conv_bias"}
LFM2_MOE = HFModel(
    "lfm2_moe",
    "Lfm2MoeForCausalLM",
    HF_FIELDS
    | {
        "num_dense_layers": "num_dense_layers",
        "num_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "moe_intermediate_size": "expert_features",
        "use_expert_bias": "use_expert_bias",
        "norm_topk_prob": "normalize_experts",
        "routed_scaling_factor": "experts_scale",
    },
    HybridConfig.hf_sizes,
    {
        "num_key_value_heads": 8,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1792,
        "use_expert_bias": True,
    },
)


@dataclasses.dataclass(frozen=True)
class ConvConfig(HybridConfig):
    """The base class of the configs of hybrids with short convolutions."""

    rope_theta: Positive = 1e6
    """θ of `ops.rotary`."""
    epsilon: Positive = 1e-5
    """ε of the norms."""
    kernel_size: int = 3
    """Number of taps of the short convolutions."""
    conv_bias: bool = False
    """Whether the short convolutions and their projections have biases."""

    def attention(self, **options: Any) -> SequenceLayer:
        return super().attention(qk_norm="head", **options)

    def mixer(self, **options: Any) -> SequenceLayer:
        biases = {"bias_init": nnx.initializers.zeros} if self.conv_bias else {}
        return self.make(ShortConvolution, use_bias=self.conv_bias, **biases, **options)


@dataclasses.dataclass(frozen=True)
class LFM2LanguageModelConfig(ConvConfig, SigmoidExpertsConfig):
    """The config of LFM2. Except for the sizes, the defaults are those of transformers.

    By default, there are no experts. transformers calls the models with experts `lfm2_moe`.
    """

    family: ClassVar = "LFM2"
    model_types: ClassVar = ("lfm2", LFM2_MOE.model_type)
    marks: ClassVar = (Mark(("model.embedding_norm.",), lacks=LATER_PARTS),)
    kinds: ClassVar = ("conv", FULL)
    block_keys: ClassVar = {"hf": _block_keys(EXPERTS), "hf-file": _block_keys(FILE_EXPERTS)}
    float32_keys: ClassVar = (f".{EXPERT_BIAS}",)
    layouts: ClassVar = {"hf": STATE_DICT, "hf-file": FILE}
    hf_class: ClassVar = "Lfm2ForCausalLM"
    hf_fields: ClassVar = HF_FIELDS
    hf_experts: ClassVar = LFM2_MOE
    hf_values: ClassVar = {"rope_type": ("default",), "tie_word_embeddings": (True, False)}
    hf_defaults: ClassVar = {"num_key_value_heads": 8}
    published: ClassVar = {
        "LFM2-350M": {
            "vocab_size": 65_536,
            "features": 1024,
            "num_layers": 16,
            "mlp_features": 4608,
            "block_types": tuple(FULL if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)),
            "num_heads": 16,
            "num_kv_heads": 8,
        }
    }
    presets: ClassVar = {"lfm2": {}}

    block_types: tuple[str, ...] = ("conv", "conv", FULL)
    """The kinds of the blocks, from the lowest up. The pattern repeats."""
    num_dense_layers: Index = 2
    """Number of the lowest blocks that have MLPs even if all other blocks have experts."""
    use_expert_bias: bool = False
    """Whether a bias, which training leaves alone, influences the choice of experts."""

    def build(self, **options: Unpack[NormOptions]) -> "LFM2LanguageModel":
        return LFM2LanguageModel(self, **options)

    @classmethod
    def converted(cls, given: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """Computes the width of the MLPs, in integers as transformers does."""
        tied = given.get("tie_embedding", given["tie_word_embeddings"])
        fields = super().converted(given, config) | {"tied_head": tied}
        if given["model_type"] == LFM2_MOE.model_type:
            return fields  # its width is stated
        width = given.get("block_ff_dim", given["intermediate_size"])
        if given.get("block_auto_adjust_ff_dim", True):
            width = int(2 * width / 3)
            factor = config.get("block_ffn_dim_multiplier", 1.0)
            if factor is not None:
                multiple = given.get("block_multiple_of", 256)
                width = -(-int(factor * width) // multiple) * multiple
        return fields | {"mlp_features": width}

    @classmethod
    def layer_types(cls, given: Mapping[str, Any]) -> Any:
        """By default, the blocks of `full_attn_idxs` have attention, or else all blocks."""
        numbers = range(given["num_hidden_layers"])
        attention = given.get("full_attn_idxs", numbers)
        return given.get("layer_types", [cls.kinds[i in attention] for i in numbers])

    def to_hf(self) -> dict[str, Any]:
        """Returns the config.json, with all names of the MLPs' width and of the tied head."""
        fields = super().to_hf() | {"tie_embedding": self.tied_head}
        if self.num_experts:
            return fields
        return fields | {"block_ff_dim": self.mlp_features, "block_auto_adjust_ff_dim": False}

    def has_experts(self, number: int) -> bool:
        return self.num_experts > 0 and number >= self.num_dense_layers

    def experts(self, **options: Any) -> Experts:
        return super().experts(epsilon=1e-6, use_expert_bias=self.use_expert_bias, **options)


class LFM2LanguageModel(HybridLanguageModel):
    """Token embedding → blocks with a short convolution or attention → RMSNorm → head.

        >>> model = LFM2LanguageModelConfig(features=64).build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

        x ← x + mixer(norm(x)),   x ← x + mlp(norm(x))

    The mixer is a `ShortConvolution` or an `Attention`, which norms the queries and keys of each
    head. The MLP is a `GatedMLP` with silu. With `num_experts`, the blocks from `num_dense_layers`
    on have a mixture of `Experts` instead. The head is the token embedding, or a matrix of its own.

    Args:
        config: the sizes. `LFM2LanguageModelConfig.from_hf` reads them from a config.json.
        **options: as for every layer. Matrices and convolutions are drawn from a normal
            distribution, and biases are zero, as in transformers.

    Layouts: `hf` (transformers' Lfm2ForCausalLM and Lfm2MoeForCausalLM) and `hf-file` (the files
    that they save, in which experts have other keys, and which lack `lm_head.weight` if the head is
    tied).

    """


@layouts_of(ShortConvolution)
def conv_layouts(layer: ShortConvolution) -> Layouts:
    """`lfm2`: the keys of transformers' Lfm2ShortConv."""
    has_bias = layer.conv.bias is not None
    inputs = ("in_gate_proj", "out_gate_proj", "value_proj")  # B, C and u, side by side
    input_rows = [
        parts([f"{proj}.{name}" for proj in inputs], f"in_proj.{key}")
        for name, key in (("kernel", "weight"), ("bias", "bias"))
    ]
    return {
        "lfm2": [
            *input_rows[: 1 + has_bias],
            *nested(layer.conv.torch_rows(), "conv", "conv"),
            *linear("out_proj", "out_proj", use_bias=has_bias),
        ]
    }


@layouts_of(Attention)
def attention_layouts(attention: Attention) -> Layouts:
    """`lfm2`: the keys of transformers' Lfm2Attention, which has no gates."""
    if attention.gate_proj is not None:
        return {}
    projections = ("q_proj", "k_proj", "v_proj", "out_proj")
    return {"lfm2": attention.rows(*projections, "q_layernorm", "k_layernorm")}


@layouts_of(GatedMLP)
def mlp_layouts(mlp: GatedMLP) -> Layouts:
    """`lfm2`: the keys of transformers' Lfm2MLP, which has no biases."""
    return {} if mlp.use_bias else {"lfm2": mlp.rows(*PROJECTIONS)}
