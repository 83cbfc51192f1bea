"""The dense hybrids of IBM's Granite 4: Mamba-2 and attention, with multipliers."""

__all__ = ["GraniteLanguageModel", "GraniteLanguageModelConfig"]

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

from jax_models.checks.values import Positive
from jax_models.layers.attention import Attention
from jax_models.layers.mlp import GatedMLP
from jax_models.models.architecture import UNDETERMINED, Size
from jax_models.models.hybrid import (
    FULL,
    LINEAR,
    MAMBA2_SIZES,
    BlockKeys,
    HybridBlock,
    HybridLanguageModel,
    Mamba2HybridConfig,
    model_layouts,
)
from jax_models.options import LayerOptions, NormOptions
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, layouts_of

PROJECTIONS = ("input_linear", "input_linear", "output_linear")
NORMS = ("input_layernorm", "post_attention_layernorm")
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier")
SIZES = {
    "mlp_features": Size("*.shared_mlp.output_linear.weight", 1, rank=2),
    **dict.fromkeys((*MULTIPLIERS, "logits_scaling"), UNDETERMINED),
    **MAMBA2_SIZES,
}
LAYOUT, FILE = model_layouts("model", "norm", SIZES, blocks_layout="hf")
OLDER_NAMES = {"mamba": LINEAR, "attention": FULL}
"""The names that files from before transformers 5 have for the kinds of blocks."""


@dataclasses.dataclass(frozen=True)
class GraniteLanguageModelConfig(Mamba2HybridConfig):
    """The config of a Granite 4 without experts. The defaults are transformers', except for sizes.

    transformers calls these models `granitemoehybrid`.
    """

    family: ClassVar = "Granite 4"
    presets: ClassVar = {
        "granite": {
            "model.embedding_multiplier": 12.0,
            "model.residual_multiplier": 0.5,
            "model.attention_multiplier": 1 / 48,
            "model.logits_scaling": 2.0,
        }
    }
    model_types: ClassVar = ("granitemoehybrid",)
    marks: ClassVar = (".shared_mlp.input_linear.",)
    block_keys: ClassVar = {
        "hf": {
            LINEAR: BlockKeys("mamba", *NORMS, "mamba2", "shared_mlp", PROJECTIONS),
            FULL: BlockKeys("self_attn", *NORMS, "granite", "shared_mlp", PROJECTIONS),
        }
    }
    layouts: ClassVar = {"hf": LAYOUT, "hf-file": FILE}
    hf_class: ClassVar = "GraniteMoeHybridForCausalLM"
    hf_fields: ClassVar = {
        {"intermediate_size": "shared_intermediate_size"}.get(name, name): ours
        for name, ours in Mamba2HybridConfig.hf_fields.items()
    } | {name: name for name in (*MULTIPLIERS, "logits_scaling")}
    hf_sizes: ClassVar = (
        *("vocab_size", "hidden_size", "num_hidden_layers"),
        *("shared_intermediate_size", "num_attention_heads"),
    )
    hf_values: ClassVar = {
        **Mamba2HybridConfig.hf_values,
        "position_embedding_type": (None, "nope", "rope"),
        "num_local_experts": (0,),
    }
    hf_defaults: ClassVar = {**Mamba2HybridConfig.hf_defaults, "num_local_experts": 8}

    rope_theta: Positive | None = None
    """θ of `ops.rotary`. None: the attention has no positions."""
    embedding_multiplier: float = 1.0
    """The factor by which the token embeddings are multiplied."""
    residual_multiplier: float = 1.0
    """The factor by which the outputs of mixers and MLPs are multiplied before they are added."""
    attention_multiplier: Positive = 1.0
    """The factor of the scores before the softmax, which replaces 1 / √head_features."""
    logits_scaling: Positive = 1.0
    """The number by which the logits are divided."""

    def build(self, **options: Unpack[NormOptions]) -> "GraniteLanguageModel":
        return GraniteLanguageModel(self, **options)

    @classmethod
    def converted(cls, given: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """Leaves out θ unless the model rotates queries and keys."""
        rotates = given["position_embedding_type"] == "rope"
        theta = given.get("rope_theta", 10_000.0) if rotates else None
        return super().converted(given, config) | {"rope_theta": theta}

    @classmethod
    def layer_types(cls, given: Mapping[str, Any]) -> Any:
        """By default, all blocks have a Mamba-2."""
        types = given.get("layer_types", given.get("layers_block_type"))
        if types is None:
            return [LINEAR] * given["num_hidden_layers"]
        return [OLDER_NAMES.get(kind, kind) for kind in types]

    def to_hf(self) -> dict[str, Any]:
        """Returns the config.json, which says that the model has no experts."""
        fields = super().to_hf() | {
            "intermediate_size": self.mlp_features,
            "num_local_experts": 0,
            "position_embedding_type": "nope" if self.rope_theta is None else "rope",
        }
        if self.rope_theta is None:
            del fields["rope_parameters"]
        return fields

    def block(self, kind: str, **options: Unpack[LayerOptions]) -> HybridBlock:
        block = super().block(kind, **options)
        block.residual_scale = self.residual_multiplier
        return block

    def attention(self, **options: Any) -> SequenceLayer:
        rotary = {"rotary_features": 0} if self.rope_theta is None else {}
        return super().attention(scale=self.attention_multiplier, **rotary, **options)


class GraniteLanguageModel(HybridLanguageModel):
    """Token embedding → blocks with Mamba-2 or attention → RMSNorm → head.

        >>> model = GraniteLanguageModelConfig(features=64, num_heads=2).build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

        x = embedding_multiplier · embedding(tokens)
        x ← x + residual_multiplier · mixer(norm(x)),   x ← x + residual_multiplier · mlp(norm(x))
        logits = head(norm(x)) / logits_scaling

    The mixer is a `Mamba2`, or in some blocks an `Attention` whose scores are multiplied by
    attention_multiplier. By default, the attention has no positions. The MLP is a `GatedMLP` with
    silu. The head is the token embedding, or a matrix of its own. The multipliers are applied when
    the model runs, so that the weights are those of the checkpoint.

    Args:
        config: the sizes. `GraniteLanguageModelConfig.from_hf` reads them from a config.json.
        **options: as for every layer. Matrices and convolutions are drawn from a normal
            distribution, `dt_bias` is one, and the other parameters start as in `Mamba2`, as in
            transformers.

    Layouts: `hf` (transformers' GraniteMoeHybridForCausalLM) and `hf-file` (the same without
    `lm_head.weight` if the head is tied).

    """

    config: GraniteLanguageModelConfig

    def embed(self, tokens, positions):
        """Returns the multiplied embeddings."""
        return self.config.embedding_multiplier * super().embed(tokens, positions)

    def unembed(self, x):
        """Maps the normalized output of the blocks to logits, and divides them."""
        return super().unembed(x) / self.config.logits_scaling


@layouts_of(Attention)
def attention_layouts(attention: Attention) -> Layouts:
    """`granite`: the keys of transformers' GraniteMoeHybridAttention, which has no norms."""
    if attention.qk_norm is not None:
        return {}
    return {"granite": attention.rows("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}


@layouts_of(GatedMLP)
def mlp_layouts(mlp: GatedMLP) -> Layouts:
    """`granite`: the keys of transformers' GraniteMoeHybridMLP, which has no biases."""
    return {} if mlp.use_bias else {"granite": mlp.rows(*PROJECTIONS)}
