"""The text model of Qwen3.5: Gated DeltaNet, gated attention in every fourth block, and experts."""

__all__ = ["Qwen35LanguageModel", "Qwen35LanguageModelConfig"]

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Self, Unpack

from jax_models.layers.attention import Attention
from jax_models.layers.experts import Experts
from jax_models.layers.gated_delta_net import GatedDeltaNet
from jax_models.layers.norm import ZeroCenteredRMSNorm
from jax_models.models.architecture import Checkpoint, Fields, Mark
from jax_models.models.hf import HFModel, kinds_by_key
from jax_models.models.hybrid import (
    BALANCE_FIELDS,
    FULL,
    LINEAR,
    BalancedExpertsConfig,
    BlockKeys,
    ExpertsKeys,
    GatedDeltaNetConfig,
    HybridLanguageModel,
    attention_sizes,
    experts_sizes,
    model_layouts,
)
from jax_models.options import NormOptions
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, layouts_of, linear, nested, rms_norm, same
from jax_models.weights.rows import side_by_side

NORMS = ("input_layernorm", "post_attention_layernorm")
SHARED = {"shared": "mlp.shared_expert", "shared_gate": "mlp.shared_expert_gate"}
EXPERTS = ExpertsKeys(
    "mlp.gate.weight",
    "mlp.experts.gate_up_proj",
    "mlp.experts.gate_up_proj",
    "mlp.experts.down_proj",
    **SHARED,
)
"""The keys of the experts in a `state_dict`."""
FILE_EXPERTS = ExpertsKeys(
    EXPERTS.router,
    "mlp.experts.{}.gate_proj.weight",
    "mlp.experts.{}.up_proj.weight",
    "mlp.experts.{}.down_proj.weight",
    **SHARED,
)
"""The keys of the experts in a saved file."""


def block_keys(layout: str, experts: ExpertsKeys) -> dict[str, BlockKeys]:
    """The keys of the blocks, whose Gated DeltaNets have this layout."""
    return {
        LINEAR: BlockKeys("linear_attn", *NORMS, layout, experts=experts),
        FULL: BlockKeys("self_attn", *NORMS, "qwen3_5", experts=experts),
    }


def mixer_sizes(checkpoint: Checkpoint) -> Fields:
    """Reads the fields of the mixers, and whether the head is tied."""
    return {
        "block_types": kinds_by_key(checkpoint, "*.linear_attn.A_log", LINEAR, FULL),
        **attention_sizes(checkpoint, "self_attn", "q_norm", parts=2),
        "attention_bias": checkpoint.has("*.self_attn.q_proj.bias"),
        "tied_head": checkpoint.tied_head,
        **delta_net_sizes(checkpoint, "norm"),
    }


def delta_net_sizes(checkpoint: Checkpoint, norm: str) -> Fields:
    """Reads the fields of the Gated DeltaNets, whose norm has this name."""
    num_key_heads = checkpoint.given("num_key_heads")
    if not checkpoint.has("*.linear_attn.A_log"):
        return {}
    num_value_heads = checkpoint.size("*.linear_attn.A_log", 0, rank=1)
    value_features = checkpoint.size(f"*.linear_attn.{norm}.weight", 0, rank=1)
    # The convolution has the channels of the queries, the keys and the values.
    channels = checkpoint.size("*.linear_attn.conv1d.weight", 0, rank=3)
    return {
        "num_value_heads": num_value_heads,
        "value_features": value_features,
        "key_features": (channels - num_value_heads * value_features) // (2 * num_key_heads),
        "kernel_size": checkpoint.size("*.linear_attn.conv1d.weight", 2, rank=3),
    }


def _sizes(experts: ExpertsKeys, checkpoint: Checkpoint) -> Fields:
    # In a model with experts, this is the width of the shared expert.
    mlp = checkpoint.first(f"*.{experts.shared}.gate_proj.weight", "*.mlp.gate_proj.weight")
    return {
        "mlp_features": checkpoint.size(mlp, 0),
        **mixer_sizes(checkpoint),
        **experts_sizes(checkpoint, experts),
    }


STACKED, SINGLE = partial(_sizes, EXPERTS), partial(_sizes, FILE_EXPERTS)
TEXT, TEXT_FILE = model_layouts("model", "norm", STACKED, SINGLE)
WHOLE, WHOLE_FILE = model_layouts("model.language_model", "norm", STACKED, SINGLE)
HF_FIELDS = GatedDeltaNetConfig.hf_fields | {"partial_rotary_factor": "rotary_fraction"}
EXPERTS_FIELDS = {
    "num_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "expert_features",
    **BALANCE_FIELDS,
}
DEFAULTS = {
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
QWEN35_MOE = HFModel(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    {
        {"intermediate_size": "shared_expert_intermediate_size"}.get(name, name): ours
        for name, ours in HF_FIELDS.items()
    }
    | EXPERTS_FIELDS,
    (
        *("vocab_size", "hidden_size", "num_hidden_layers"),
        *("shared_expert_intermediate_size", "num_attention_heads"),
    ),
    DEFAULTS
    | {
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
    },
)


@dataclasses.dataclass(frozen=True)
class Qwen35LanguageModelConfig(GatedDeltaNetConfig, BalancedExpertsConfig):
    """The config of Qwen3.5. Except for the sizes, the defaults are those of transformers.

    By default, there are no experts. transformers calls the models with experts `qwen3_5_moe`.
    """

    family: ClassVar = "Qwen3.5"
    model_types: ClassVar = ("qwen3_5_text", "qwen3_5", QWEN35_MOE.model_type, "qwen3_5_moe")
    marks: ClassVar = (
        Mark((".linear_attn.in_proj_qkv.", ".mlp.shared_expert_gate.")),
        Mark((".linear_attn.in_proj_qkv.",), lacks=(".mlp.shared_expert.",)),
    )
    left_out: ClassVar = ("mtp.", "model.visual.", "visual.")
    norm: ClassVar = ZeroCenteredRMSNorm
    block_keys: ClassVar = {
        "hf": block_keys("qwen3_5", EXPERTS),
        "hf-file": block_keys("qwen3_5", FILE_EXPERTS),
    }
    layouts: ClassVar = {
        "hf": TEXT,
        "hf-file": TEXT_FILE,
        "multimodal": WHOLE,
        "multimodal-file": WHOLE_FILE,
    }
    hf_class: ClassVar = "Qwen3_5ForCausalLM"
    hf_fields: ClassVar = HF_FIELDS
    hf_defaults: ClassVar = DEFAULTS | {"num_key_value_heads": 4}
    hf_experts: ClassVar = QWEN35_MOE
    published: ClassVar = {
        "Qwen3.5-0.8B": {
            "vocab_size": 248_320,
            "features": 1024,
            "num_layers": 24,
            "mlp_features": 3584,
            "num_heads": 8,
            "num_kv_heads": 2,
            "head_features": 256,
            "num_key_heads": 16,
            "num_value_heads": 16,
            "key_features": 128,
            "value_features": 128,
        }
    }
    presets: ClassVar = {"qwen3_5": {}}

    mlp_features: int = 512
    """Width of the gated MLPs, or in a model with experts of the shared expert."""
    rotary_fraction: float = 0.25
    """The fraction of each head that rotary positions rotate."""

    def build(self, **options: Unpack[NormOptions]) -> "Qwen35LanguageModel":
        return Qwen35LanguageModel(self, **options)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a config.json of the text model, or the `text_config` of a multimodal model."""
        model_type = config.get("model_type")
        if model_type in ("qwen3_5", "qwen3_5_moe"):
            text = config.get("text_config")
            if not isinstance(text, Mapping):
                raise ValueError(f"config: text_config: expected an object, got {text!r}")
            own = ("tie_word_embeddings", "quantization_config")
            shared = {name: config[name] for name in own if config.get(name) is not None}
            config = {"model_type": f"{model_type}_text", **text, **shared}
        return super().from_hf(config)

    @property
    def rotary_features(self) -> int:
        """The number of features of a head that `Attention` rotates."""
        return int(self.head_size * self.rotary_fraction)

    def attention(self, **options: Any) -> SequenceLayer:
        return super().attention(
            rotary_features=self.rotary_features,
            rope_theta=self.rope_theta if self.rotary_features else None,
            qk_norm="head",
            zero_centered_norm=True,
            output_gate=True,
            **options,
        )

    def experts(self, **options: Any) -> Experts:
        options = {"shared_features": self.mlp_features, **options}
        return super().experts(shared_gate=True, **options)


class Qwen35LanguageModel(HybridLanguageModel):
    """Token embedding → blocks with Gated DeltaNet or gated attention → RMSNorm → head.

        >>> model = Qwen35LanguageModelConfig(features=64).build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

        x ← x + mixer(norm(x)),   x ← x + mlp(norm(x))

    The mixer is a `GatedDeltaNet`, or in every fourth block an `Attention` with an output gate and
    normed queries and keys, a part of which is rotated. All these norms multiply by 1 + scale. The
    MLP is a `GatedMLP` with silu. With `num_experts`, it is a mixture of `Experts`, whose shared
    expert is this MLP and has a gate. The head is the token embedding, or a matrix of its own.

    Args:
        config: the sizes. `Qwen35LanguageModelConfig.from_hf` reads them from a config.json.
        **options: as for every layer. Matrices and convolutions are drawn from a normal
            distribution, the rest as in `GatedDeltaNet`, which is as in transformers.

    Layouts: `hf` (transformers' Qwen3_5ForCausalLM and Qwen3_5MoeForCausalLM), `multimodal` (the
    text part of its Qwen3_5ForConditionalGeneration and Qwen3_5MoeForConditionalGeneration), and
    `hf-file` and `multimodal-file` (files in which experts have other keys, and which lack
    `lm_head.weight` if the head is tied).

    """


@layouts_of(GatedDeltaNet, default=True)
def delta_net_layouts(layer: GatedDeltaNet) -> Layouts:
    """`qwen3_5`, and `qwen3_next`, which has q, k, v and z of each key head side by side."""
    served = layer.num_value_heads // layer.num_key_heads
    keys, values = layer.key_features, served * layer.value_features
    qkvz, ba = [f"{name}_proj" for name in "qkvz"], ["b_proj", "a_proj"]
    shared = [
        *(same(name, name) for name in ("A_log", "dt_bias")),
        *rms_norm("norm", "norm"),
        *linear("out_proj", "out_proj", bias=False),
        *nested(layer.conv.torch_rows(), "conv", "conv1d"),
    ]
    return {
        "qwen3_5": [
            *shared,
            side_by_side(qkvz[:3], "in_proj_qkv.weight", layer.sizes),
            *(row for n in "zba" for row in linear(f"{n}_proj", f"in_proj_{n}", bias=False)),
        ],
        "qwen3_next": [
            *shared,
            side_by_side(
                qkvz, "in_proj_qkvz.weight", (keys, keys, values, values), layer.num_key_heads
            ),
            side_by_side(ba, "in_proj_ba.weight", (served, served), layer.num_key_heads),
        ],
    }


@layouts_of(Attention, default=True)
def attention_layouts(attention: Attention) -> Layouts:
    """`qwen3_5`: the keys of transformers' Qwen3_5Attention, with no norm over all heads."""
    if attention.qk_norm == "all" or attention.gate_proj is not None:
        return {}
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    return {"qwen3_5": attention.rows(*projections, "q_norm", "k_norm")}
