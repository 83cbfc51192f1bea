"""Bamba: Mamba-2, and attention whose heads are rotated by half."""

__all__ = ["BambaLanguageModel", "BambaLanguageModelConfig"]

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

from jax_models.checks.values import Positive
from jax_models.layers.mlp import GatedMLP
from jax_models.models.architecture import Checkpoint, Fields, Mark
from jax_models.models.hybrid import (
    FULL,
    LINEAR,
    BlockKeys,
    HybridLanguageModel,
    model_layouts,
)
from jax_models.models.mamba2_hybrid import Mamba2HybridConfig, mamba2_hybrid_sizes
from jax_models.options import NormOptions
from jax_models.sequence import SequenceLayer

NORMS = ("input_layernorm", "pre_ff_layernorm")


def _sizes(checkpoint: Checkpoint) -> Fields:
    return {
        "mlp_features": checkpoint.size("*.feed_forward.gate_proj.weight", 0, rank=2),
        "mlp_bias": checkpoint.has("*.feed_forward.gate_proj.bias"),
        **mamba2_hybrid_sizes(checkpoint, "self_attn", "mamba"),
    }


LAYOUT, FILE = model_layouts("model", "final_layernorm", _sizes)


@dataclasses.dataclass(frozen=True)
class BambaLanguageModelConfig(Mamba2HybridConfig):
    """The config of Bamba. Except for the sizes, the defaults are those of transformers."""

    family: ClassVar = "Bamba"
    presets: ClassVar = {"bamba": {}}
    model_types: ClassVar = ("bamba",)
    marks: ClassVar = (
        # The first block has one mixer. Falcon-H1's blocks have both, Jamba has another Mamba, and
        # Zamba2 shares its attention.
        Mark(
            (".pre_ff_layernorm.", ".layers.0.mamba.dt_bias"),
            lacks=(".layers.0.self_attn.", ".shared_transformer."),
        ),
        Mark(
            (".pre_ff_layernorm.", ".layers.0.self_attn."),
            lacks=(".layers.0.mamba.", ".mamba.x_proj."),
        ),
    )
    block_keys: ClassVar = {
        "hf": {
            LINEAR: BlockKeys("mamba", *NORMS, "mamba2", "feed_forward"),
            FULL: BlockKeys("self_attn", *NORMS, "llama", "feed_forward"),
        }
    }
    layouts: ClassVar = {"hf": LAYOUT, "hf-file": FILE}
    hf_class: ClassVar = "BambaForCausalLM"
    hf_fields: ClassVar = Mamba2HybridConfig.hf_fields | {"mlp_bias": "mlp_bias"}
    hf_defaults: ClassVar = {**Mamba2HybridConfig.hf_defaults, "num_key_value_heads": 8}

    epsilon: Positive = 1e-5
    """ε of the norms."""
    mlp_bias: bool = False
    """Whether the projections of the MLPs have biases."""
    rotary_fraction: float = 0.5
    """The fraction of each head that rotary positions rotate."""

    def build(self, **options: Unpack[NormOptions]) -> "BambaLanguageModel":
        return BambaLanguageModel(self, **options)

    @classmethod
    def converted(cls, given: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the rotated fraction, which transformers ignores outside `rope_parameters`."""
        rotary = config.get("rope_parameters") or {}
        fraction = rotary.get("partial_rotary_factor", cls.rotary_fraction)
        return super().converted(given, config) | {"rotary_fraction": fraction}

    @classmethod
    def layer_types(cls, given: Mapping[str, Any]) -> Any:
        """The blocks of `attn_layer_indices` have attention, by default none."""
        attention = given.get("attn_layer_indices", ())
        return [cls.kinds[i in attention] for i in range(given["num_hidden_layers"])]

    def to_hf(self) -> dict[str, Any]:
        """Returns the config.json, which numbers the blocks with attention."""
        fields = super().to_hf()
        types = fields.pop("layer_types")
        fields["attn_layer_indices"] = [i for i, kind in enumerate(types) if kind == FULL]
        fields["rope_parameters"]["partial_rotary_factor"] = self.rotary_fraction
        return fields

    @property
    def rotary_features(self) -> int:
        """The number of features of a head that `Attention` rotates."""
        return int(self.head_size * self.rotary_fraction)

    def attention(self, **options: Any) -> SequenceLayer:
        rotated = self.rotary_features
        theta = self.rope_theta if rotated else None
        return super().attention(rotary_features=rotated, rope_theta=theta, **options)

    def mlp(self, **options: Any) -> GatedMLP:
        return super().mlp(use_bias=self.mlp_bias, **options)


class BambaLanguageModel(HybridLanguageModel):
    """Token embedding → blocks with Mamba-2 or attention → RMSNorm → head.

        >>> model = BambaLanguageModelConfig(features=64, num_heads=2).build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

        x ← x + mixer(norm(x)),   x ← x + mlp(norm(x))

    The mixer is a `Mamba2`, or in some blocks an `Attention` that rotates the first half of each
    head. The MLP is a `GatedMLP` with silu. The head is the token embedding, or a matrix of its
    own.

    Args:
        config: the sizes. `BambaLanguageModelConfig.from_hf` reads them from a config.json.
        **options: as for every layer. Matrices and convolutions are drawn from a normal
            distribution, `dt_bias` is one, and the other parameters start as in `Mamba2`, as in
            transformers.

    Layouts: `hf` (transformers' BambaForCausalLM) and `hf-file` (the same without `lm_head.weight`
    if the head is tied).

    """
