"""Ling 3: the mixers and experts of Kimi Linear, with bounded decays, positions and gates."""

__all__ = ["LingLanguageModel", "LingLanguageModelConfig"]

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Unpack

from jax_models.checks.values import Positive
from jax_models.layers.latent_attention import LatentAttention
from jax_models.models.hybrid import FULL, LINEAR, BlockKeys, ExpertsKeys, model_layouts
from jax_models.models.kimi_linear import (
    EXPERTS,
    NORMS,
    SIZES,
    HybridKeys,
    KimiLinearLanguageModel,
    KimiLinearLanguageModelConfig,
    experts_keys,
    hybrid_sizes,
)
from jax_models.options import Index, NormOptions
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, layouts_of

IN_FILE = "bailing_hybrid-file"
"""The layout of both mixers in the files."""
SINGLE = tuple(f"experts.{{}}.{name}_proj.weight" for name in ("gate", "up", "down"))
FILE_EXPERTS = experts_keys("mlp", SINGLE, "mlp.gate.expert_bias")


def _block_keys(mixer: str, delta: str, latent: str, experts: ExpertsKeys) -> dict[str, BlockKeys]:
    return {
        kind: BlockKeys(mixer, *NORMS, layout, experts=experts)
        for kind, layout in ((LINEAR, delta), (FULL, latent))
    }


FILE_KEYS = HybridKeys("attention", "A_log", "q_conv1d", "mlp", FILE_EXPERTS)
STATE_DICT, FILE = model_layouts("model", "norm", SIZES, partial(hybrid_sizes, FILE_KEYS))


@dataclasses.dataclass(frozen=True)
class LingLanguageModelConfig(KimiLinearLanguageModelConfig):
    """The config of Ling 3. Except for the sizes, the defaults are those of transformers."""

    family: ClassVar = "Ling 3"
    presets: ClassVar = {"ling": {}}
    model_types: ClassVar = ("bailing_hybrid",)
    marks: ClassVar = (".forget_gate.f_proj.", ".attention.f_proj.")
    float32_keys: ClassVar = (
        *KimiLinearLanguageModelConfig.float32_keys,
        ".conv1d.weight",
        *(f".{name}_conv1d.weight" for name in "qkv"),
        ".gate.expert_bias",
    )
    block_keys: ClassVar = {
        "hf": _block_keys("self_attn", "bailing_hybrid", "deepseek", EXPERTS),
        "hf-file": _block_keys("attention", IN_FILE, IN_FILE, FILE_EXPERTS),
    }
    layouts: ClassVar = {
        "hf": STATE_DICT,
        "hf-file": FILE._replace(embedding="model.word_embeddings.weight"),
    }
    hf_class: ClassVar = "BailingHybridForCausalLM"
    hf_fields: ClassVar = KimiLinearLanguageModelConfig.hf_fields | {"rope_theta": "rope_theta"}
    hf_values: ClassVar = {
        "hidden_act": ("silu",),
        "attention_dropout": (0,),
        "rope_type": ("default",),
    }
    hf_defaults: ClassVar = {
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts": 512,
        "num_experts_per_token": 8,
        "moe_intermediate_size": 768,
        "num_expert_group": 8,
        "topk_group": 4,
    }

    rope_theta: Positive = 6e6
    """θ of `ops.rotary`."""
    min_log_decay: float | None = -5.0
    """The lower bound of the logarithms of decays. None: decays are not bounded."""
    num_dense_layers: Index = 2
    """Number of the lowest blocks that have MLPs even if all other blocks have experts."""
    experts_scale: Positive = 2.5
    """The factor of the weights of the experts."""
    epsilon: Positive = 1e-6
    """ε of the norms, except for those of latents."""

    def build(self, **options: Unpack[NormOptions]) -> "LingLanguageModel":
        return LingLanguageModel(self, **options)

    @property
    def left_out(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The block after the last, which predicts a second token."""
        return (f"model.layers.{self.num_layers}.",)

    @classmethod
    def converted(cls, given: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """Finds the sizes of Kimi Delta Attention, which published files state by other names."""
        is_bounded = given.get("kda_safe_gate", True)
        heads, kernel_size = given["num_attention_heads"], given.get("short_conv_kernel_size", 4)
        return super().converted(given, config) | {
            "delta_heads": given.get("linear_num_heads", heads),
            "delta_head_features": given.get("linear_head_dim", given.get("head_dim", 128)),
            "kernel_size": given.get("linear_conv_kernel_dim", kernel_size),
            "min_log_decay": given.get("kda_lower_bound", -5.0) if is_bounded else None,
        }

    @classmethod
    def layer_types(cls, given: Mapping[str, Any]) -> Any:
        """The kind of each block, by default attention in the last of each group."""
        size = given.get("layer_group_size", 6)
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"config: layer_group_size: expected a positive integer, got {size}")
        numbers = range(given["num_hidden_layers"])
        kinds = [LINEAR if (i + 1) % size else FULL for i in numbers]
        return given.get("layer_types", kinds)

    def to_hf(self) -> dict[str, Any]:
        bound = self.min_log_decay
        return {
            **super().to_hf(),
            "kda_safe_gate": bound is not None,
            **({} if bound is None else {"kda_lower_bound": bound}),
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
        }

    def attention(self, **options: Any) -> SequenceLayer:
        return super().attention(output_gate=True, **options)

    def mixer(self, **options: Any) -> SequenceLayer:
        return super().mixer(low_rank=False, **options)


class LingLanguageModel(KimiLinearLanguageModel):
    """Token embedding → blocks with Kimi Delta Attention or latent attention → RMSNorm → Linear.

        >>> model = LingLanguageModelConfig(features=64).build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

        x ← x + mixer(norm(x)),   x ← x + experts(norm(x))

    It differs from `KimiLinearLanguageModel` in its mixers: the decays of a `KimiDeltaAttention`
    are bounded, and a `LatentAttention` rotates the shared part of its keys, and has output gates.

    Args:
        config: the sizes. `LingLanguageModelConfig.from_hf` reads them from a config.json.
        **options: as for every layer. Matrices and convolutions are drawn from a normal
            distribution, the rest as in `KimiDeltaAttention`, which is as in transformers.

    Layouts: `hf` (transformers' BailingHybridForCausalLM) and `hf-file` (the published files and
    those that transformers saves).

    """


@layouts_of(LatentAttention)
def latent_layouts(layer: LatentAttention) -> Layouts:
    """`bailing_hybrid-file`: the keys of the files."""
    return {IN_FILE: layer.rows("dense")}
