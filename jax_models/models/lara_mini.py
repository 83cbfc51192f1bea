"""Lara Mini: Gated DeltaNet, attention over a window or the whole text, and experts."""

__all__ = ["LaraMiniLanguageModel", "LaraMiniLanguageModelConfig"]

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Unpack

from jax_models.layers.experts import Experts
from jax_models.layers.gated_delta_net import GatedDeltaNet, log_of_uniform
from jax_models.models.architecture import Checkpoint, Fields, Mark
from jax_models.models.hybrid import (
    FULL,
    LINEAR,
    SLIDING,
    BalancedExpertsConfig,
    BlockKeys,
    GatedDeltaNetConfig,
    HybridLanguageModel,
    WindowConfig,
    attention_sizes,
    experts_sizes,
    model_layouts,
)
from jax_models.models.qwen3_5 import EXPERTS, EXPERTS_FIELDS, block_keys, delta_net_sizes
from jax_models.options import NormOptions
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, layouts_of, linear, nested, rms_norm, same
from jax_models.weights.rows import side_by_side

IN_FILE = "lara_mini-file"
"""The layout of a Gated DeltaNet in the files."""
PATTERN = (LINEAR, SLIDING, LINEAR, FULL, SLIDING)


def _block_keys(layout: str) -> dict[str, BlockKeys]:
    keys = block_keys(layout, EXPERTS)
    return keys | {SLIDING: keys[FULL]}


def _sizes(norm: str, checkpoint: Checkpoint) -> Fields:
    return {
        "block_types": checkpoint.given("block_types"),  # both kinds of attention have equal keys
        **delta_net_sizes(checkpoint, norm),
        **attention_sizes(checkpoint, "self_attn", "q_norm"),
        "attention_bias": checkpoint.has("*.self_attn.q_proj.bias"),
        **experts_sizes(checkpoint, EXPERTS),
        "shared_features": checkpoint.size(f"*.{EXPERTS.shared}.gate_proj.weight", 0),
        "tied_head": checkpoint.tied_head,
    }


SIZES, FILE_SIZES = partial(_sizes, "norm"), partial(_sizes, "out_norm")
STATE_DICT, FILE = model_layouts("model", "norm", SIZES, FILE_SIZES)


@dataclasses.dataclass(frozen=True)
class LaraMiniLanguageModelConfig(GatedDeltaNetConfig, WindowConfig, BalancedExpertsConfig):
    """The config of Lara Mini. Except for the sizes, the defaults are those of transformers."""

    family: ClassVar = "Lara Mini"
    presets: ClassVar = {"lara-mini": {}}
    model_types: ClassVar = ("lara_mini",)
    marks: ClassVar = (
        ".linear_attn.out_norm.",
        Mark(
            (".linear_attn.in_proj_qkv.", ".mlp.shared_expert."),
            lacks=(".mlp.shared_expert_gate.",),
        ),
    )
    kinds: ClassVar = (LINEAR, SLIDING, FULL)
    float32_keys: ClassVar = (*GatedDeltaNetConfig.float32_keys, ".linear_attn.out_norm.weight")
    block_keys: ClassVar = {"hf": _block_keys("qwen3_5"), "hf-file": _block_keys(IN_FILE)}
    layouts: ClassVar = {"hf": STATE_DICT, "hf-file": FILE}
    hf_class: ClassVar = "LaraMiniForCausalLM"
    hf_fields: ClassVar = {
        **{k: v for k, v in GatedDeltaNetConfig.hf_fields.items() if k != "intermediate_size"},
        **EXPERTS_FIELDS,
        "shared_expert_intermediate_size": "shared_features",
        "norm_topk_prob": "normalize_experts",
        "sliding_window": "window",
    }
    hf_sizes: ClassVar = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    hf_values: ClassVar = {
        **GatedDeltaNetConfig.hf_values,
        "tie_word_embeddings": (True, False),
    }
    hf_defaults: ClassVar = {
        "num_key_value_heads": 4,
        "head_dim": 128,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }

    num_layers: int = 5
    """Number of residual blocks."""
    block_types: tuple[str, ...] = PATTERN
    """The kinds of the blocks, from the lowest up. The pattern repeats."""
    # All blocks have experts.
    mlp_features: ClassVar[Any] = None  # pyright: ignore[reportIncompatibleVariableOverride]
    window: int = 512
    """The number of steps that each step of the attention over a window sees, including itself."""
    num_experts: int = 8
    """Number of experts in a block, without the shared one."""
    shared_features: int = 128
    """Width of the shared expert of all tokens."""
    normalize_experts: bool = True
    """Whether the weights of a token's experts are divided by their sum."""

    def build(self, **options: Unpack[NormOptions]) -> "LaraMiniLanguageModel":
        return LaraMiniLanguageModel(self, **options)

    @classmethod
    def layer_types(cls, given: Mapping[str, Any]) -> Any:
        """The kind of each block, by default those of the published models."""
        default = [PATTERN[i % len(PATTERN)] for i in range(given["num_hidden_layers"])]
        return given.get("layer_types", default)

    def attention(self, **options: Any) -> SequenceLayer:
        """Builds attention over the whole text, which has no positions."""
        return super().attention(
            qk_norm="head", **{"rotary_features": 0, "rope_theta": None} | options
        )

    def sliding_attention(self, **options: Any) -> SequenceLayer:
        rotary = {"rotary_features": None, "rope_theta": self.rope_theta}
        return super().sliding_attention(**rotary, **options)

    def mixer(self, **options: Any) -> SequenceLayer:
        return super().mixer(decay_init=log_of_uniform(1.0, 16.0), **options)

    def experts(self, **options: Any) -> Experts:
        router = {"normalize": self.normalize_experts}
        return super().experts(shared_features=self.shared_features, **router, **options)


class LaraMiniLanguageModel(HybridLanguageModel):
    """Token embedding → blocks with Gated DeltaNet or attention → RMSNorm → head.

        >>> model = LaraMiniLanguageModelConfig(features=64).build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

        x ← x + mixer(norm(x)),   x ← x + experts(norm(x))

    The mixer is a `GatedDeltaNet`, an `Attention` over the last `window` steps with rotary
    positions, or one over all steps without positions. The queries and keys of each head are
    normed. The weights of a token's `Experts` are a softmax, divided by their sum, and a shared
    expert is added. The head is the token embedding, or a matrix of its own.

    Args:
        config: the sizes. `LaraMiniLanguageModelConfig.from_hf` reads them from a config.json.
        **options: as for every layer. Matrices and convolutions are drawn from a normal
            distribution, A is uniform in [1, 16], and the rest as in `GatedDeltaNet`, as in
            transformers.

    Layouts: `hf` (transformers' LaraMiniForCausalLM) and `hf-file` (the files that it saves, in
    which a single matrix holds all projections into a Gated DeltaNet, and which lack
    `lm_head.weight` if the head is tied).

    """


@layouts_of(GatedDeltaNet)
def delta_net_layouts(layer: GatedDeltaNet) -> Layouts:
    """`lara_mini-file`: the keys of the files, with q, k, v, z, b and a in one matrix."""
    sizes = *layer.sizes, layer.sizes[2], layer.num_value_heads, layer.num_value_heads
    return {
        IN_FILE: [
            *(same(name, name) for name in ("A_log", "dt_bias")),
            *rms_norm("norm", "out_norm"),
            *linear("out_proj", "out_proj", bias=False),
            *nested(layer.conv.torch_rows(), "conv", "conv1d"),
            side_by_side([f"{name}_proj" for name in "qkvzba"], "in_proj.weight", sizes),
        ]
    }
