"""The hybrids of IBM's Granite 4: Mamba-2 and attention, with multipliers and experts."""

__all__ = ["GraniteLanguageModel", "GraniteLanguageModelConfig"]

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Unpack

from jax_models.checks.values import Positive
from jax_models.layers.experts import Experts
from jax_models.layers.mlp import GatedMLP
from jax_models.models.architecture import Checkpoint, Fields
from jax_models.models.hybrid import (
    BALANCE_FIELDS,
    FULL,
    LINEAR,
    OLDER_KINDS,
    BalancedExpertsConfig,
    BlockKeys,
    ExpertsKeys,
    HybridBlock,
    HybridLanguageModel,
    experts_sizes,
    model_layouts,
)
from jax_models.models.mamba2_hybrid import Mamba2HybridConfig, mamba2_hybrid_sizes
from jax_models.options import LayerOptions, NormOptions
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, layouts_of

PROJECTIONS = ("input_linear", "input_linear", "output_linear")
NORMS = ("input_layernorm", "post_attention_layernorm")
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier")
EXPERTS = ExpertsKeys(
    "block_sparse_moe.router.weight",
    "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.experts.down_proj",
    shared="shared_mlp",
)
"""The keys of the experts in a `state_dict`."""
FILE_EXPERTS = ExpertsKeys(
    "block_sparse_moe.router.layer.weight",
    "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.output_linear.weight",
    shared="shared_mlp",
)
"""The keys of the experts in a saved file."""


def _block_keys(experts: ExpertsKeys) -> dict[str, BlockKeys]:
    mlp = ("shared_mlp", PROJECTIONS, experts)
    return {
        LINEAR: BlockKeys("mamba", *NORMS, "mamba2", *mlp),
        FULL: BlockKeys("self_attn", *NORMS, "llama", *mlp),
    }


def _sizes(experts: ExpertsKeys, checkpoint: Checkpoint) -> Fields:
    return {
        "mlp_features": checkpoint.size("*.shared_mlp.output_linear.weight", 1, rank=2),
        **experts_sizes(checkpoint, experts),
        **{name: checkpoint.given(name) for name in (*MULTIPLIERS, "logits_scaling")},
        **mamba2_hybrid_sizes(checkpoint, "self_attn", "mamba"),
    }


SIZES, FILE_SIZES = partial(_sizes, EXPERTS), partial(_sizes, FILE_EXPERTS)
STATE_DICT, FILE = model_layouts("model", "norm", SIZES, FILE_SIZES)


@dataclasses.dataclass(frozen=True)
class GraniteLanguageModelConfig(Mamba2HybridConfig, BalancedExpertsConfig):
    """The config of Granite 4. Except for the sizes, the defaults are those of transformers.

    By default, there are no experts. transformers calls these models `granitemoehybrid`.
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
    block_keys: ClassVar = {"hf": _block_keys(EXPERTS), "hf-file": _block_keys(FILE_EXPERTS)}
    layouts: ClassVar = {"hf": STATE_DICT, "hf-file": FILE}
    hf_class: ClassVar = "GraniteMoeHybridForCausalLM"
    hf_fields: ClassVar = {
        {"intermediate_size": "shared_intermediate_size"}.get(name, name): ours
        for name, ours in Mamba2HybridConfig.hf_fields.items()
    } | {
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "intermediate_size": "expert_features",
        **BALANCE_FIELDS,
        **{name: name for name in (*MULTIPLIERS, "logits_scaling")},
    }
    hf_sizes: ClassVar = (
        *("vocab_size", "hidden_size", "num_hidden_layers"),
        *("shared_intermediate_size", "num_attention_heads"),
    )
    hf_values: ClassVar = {
        **Mamba2HybridConfig.hf_values,
        "position_embedding_type": (None, "nope", "rope"),
    }
    hf_defaults: ClassVar = {
        **Mamba2HybridConfig.hf_defaults,
        "num_local_experts": 8,
        "intermediate_size": 11_008,
    }

    mlp_features: int = 512
    """Width of the gated MLPs, or in a model with experts of the shared expert."""
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
        """Leaves out θ unless the model rotates queries and keys, and sizes of absent experts."""
        rotates = given["position_embedding_type"] == "rope"
        theta = given.get("rope_theta", 10_000.0) if rotates else None
        fields = super().converted(given, config) | {"rope_theta": theta}
        # A null means no experts, even if another number is the default.
        if {**given, **config}["num_local_experts"]:
            return fields
        unused = ("num_experts", "experts_per_token", "expert_features")
        return fields | {name: getattr(cls, name) for name in unused}

    @classmethod
    def layer_types(cls, given: Mapping[str, Any]) -> Any:
        """By default, all blocks have a Mamba-2."""
        types = given.get("layer_types", given.get("layers_block_type"))
        if types is None:
            return [LINEAR] * given["num_hidden_layers"]
        return [OLDER_KINDS.get(kind, kind) for kind in types]

    def to_hf(self) -> dict[str, Any]:
        """Returns the config.json, which states if there are no experts or no positions."""
        fields = super().to_hf()
        fields["position_embedding_type"] = "nope" if self.rope_theta is None else "rope"
        if self.rope_theta is None:
            del fields["rope_parameters"]
        if not self.num_experts:
            fields |= {"num_experts_per_tok": 0, "intermediate_size": self.mlp_features}
        return fields

    def block(self, kind: str, number: int, **options: Unpack[LayerOptions]) -> HybridBlock:
        block = super().block(kind, number, **options)
        block.residual_scale = self.residual_multiplier
        return block

    def attention(self, **options: Any) -> SequenceLayer:
        rotary = {"rotary_features": 0} if self.rope_theta is None else {}
        return super().attention(scale=self.attention_multiplier, **rotary, **options)

    def experts(self, **options: Any) -> Experts:
        return super().experts(shared_features=self.mlp_features, **options)


class GraniteLanguageModel(HybridLanguageModel):
    """Token embedding → blocks with Mamba-2 or attention → RMSNorm → head.

        >>> model = GraniteLanguageModelConfig(features=64, num_heads=2).build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

        x = embedding_multiplier · embedding(tokens)
        x ← x + residual_multiplier · mixer(norm(x)),   x ← x + residual_multiplier · mlp(norm(x))
        logits = head(norm(x)) / logits_scaling

    The mixer is a `Mamba2`, or in some blocks an `Attention` whose scores are multiplied by
    attention_multiplier. By default, the attention has no positions. The MLP is a `GatedMLP` with
    silu. With `num_experts`, it is a mixture of `Experts`, whose shared expert is this MLP. The
    head is the token embedding, or a matrix of its own. The multipliers are applied when the model
    runs, so that the weights are those of the checkpoint.

    Args:
        config: the sizes. `GraniteLanguageModelConfig.from_hf` reads them from a config.json.
        **options: as for every layer. Matrices and convolutions are drawn from a normal
            distribution, `dt_bias` is one, and the other parameters start as in `Mamba2`, as in
            transformers.

    Layouts: `hf` (transformers' GraniteMoeHybridForCausalLM) and `hf-file` (the files that it
    saves, in which experts have other keys, and which lack `lm_head.weight` if the head is tied).

    """

    config: GraniteLanguageModelConfig

    def embed(self, tokens, positions):
        """Returns the multiplied embeddings."""
        return self.config.embedding_multiplier * super().embed(tokens, positions)

    def unembed(self, x):
        """Maps the normalized output of the blocks to logits, and divides them."""
        return super().unembed(x) / self.config.logits_scaling


@layouts_of(GatedMLP)
def mlp_layouts(mlp: GatedMLP) -> Layouts:
    """`granite`: the keys of transformers' GraniteMoeHybridMLP, which has no biases."""
    return {} if mlp.use_bias else {"granite": mlp.rows(*PROJECTIONS)}
