"""MiniMax-Text-01: lightning attention, full attention, and experts in all blocks."""

__all__ = ["MiniMaxLanguageModel", "MiniMaxLanguageModelConfig"]

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Unpack

from jax_models.checks.values import Positive
from jax_models.layers.lightning_attention import LightningAttention
from jax_models.models.architecture import Checkpoint, Fields
from jax_models.models.hf import kinds_by_key
from jax_models.models.hybrid import (
    BALANCE_FIELDS,
    FULL,
    LINEAR,
    BalancedExpertsConfig,
    BlockKeys,
    ExpertsKeys,
    HybridBlock,
    HybridConfig,
    HybridLanguageModel,
    attention_sizes,
    experts_sizes,
    model_layouts,
)
from jax_models.ops.rotary import checked_rotated
from jax_models.options import LayerOptions, NormOptions
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, ignored, layouts_of, linear, rms_norm
from jax_models.weights.rows import side_by_side

EXPERTS = ExpertsKeys(
    "mlp.gate.weight",
    "mlp.experts.gate_up_proj",
    "mlp.experts.gate_up_proj",
    "mlp.experts.down_proj",
)
"""The keys of the experts in a `state_dict`."""
FILE_EXPERTS = ExpertsKeys(
    "block_sparse_moe.gate.weight",
    "block_sparse_moe.experts.{}.w1.weight",
    "block_sparse_moe.experts.{}.w3.weight",
    "block_sparse_moe.experts.{}.w2.weight",
)
"""The keys of the experts in a saved file."""
QKV = "self_attn.qkv_proj.weight"
FACTORS = {
    "full_attn_alpha_factor": "full_alpha",
    "full_attn_beta_factor": "full_beta",
    "linear_attn_alpha_factor": "lightning_alpha",
    "linear_attn_beta_factor": "lightning_beta",
    "mlp_alpha_factor": "mlp_alpha",
    "mlp_beta_factor": "mlp_beta",
}
"""The fields of a config.json with the factors α and β, and those of our config."""
OTHER_FACTORS = {
    f"layernorm_{part}_{name}": f"{field}_{name}_factor"
    for part, field in (
        ("full_attention", "full_attn"),
        ("linear_attention", "linear_attn"),
        ("mlp", "mlp"),
    )
    for name in ("alpha", "beta")
}
"""The names of these fields in the files that MiniMax published."""


def _block_keys(experts: ExpertsKeys) -> dict[str, BlockKeys]:
    norms = "input_layernorm", "post_attention_layernorm"
    return {
        LINEAR: BlockKeys("self_attn", *norms, "minimax", experts=experts),
        FULL: BlockKeys("self_attn", *norms, "llama", experts=experts),
    }


def _sizes(experts: ExpertsKeys, checkpoint: Checkpoint) -> Fields:
    num_heads = checkpoint.given("num_heads")
    fields = {
        **experts_sizes(checkpoint, experts),
        "block_types": kinds_by_key(checkpoint, f"*.{QKV}", LINEAR, FULL),
        "num_heads": num_heads,
        **{name: checkpoint.given(name) for name in FACTORS.values()},
        **attention_sizes(checkpoint, "self_attn"),
        "tied_head": checkpoint.tied_head,
    }
    if checkpoint.has(f"*.{QKV}"):
        fields["head_features"] = checkpoint.size("*.self_attn.norm.weight", 0) // num_heads
    return fields


SIZES, FILE_SIZES = partial(_sizes, EXPERTS), partial(_sizes, FILE_EXPERTS)
STATE_DICT, FILE = model_layouts("model", "norm", SIZES, FILE_SIZES)


@dataclasses.dataclass(frozen=True)
class MiniMaxLanguageModelConfig(BalancedExpertsConfig):
    """The config of MiniMax. Except for the sizes, the defaults are those of transformers."""

    family: ClassVar = "MiniMax"
    presets: ClassVar = {"minimax": {}}
    model_types: ClassVar = ("minimax", "minimax_text_01", "minimax_m1")
    marks: ClassVar = (f".{QKV}",)
    kinds: ClassVar = (LINEAR, FULL)
    block_keys: ClassVar = {"hf": _block_keys(EXPERTS), "hf-file": _block_keys(FILE_EXPERTS)}
    layouts: ClassVar = {"hf": STATE_DICT, "hf-file": FILE}
    hf_class: ClassVar = "MiniMaxForCausalLM"
    hf_fields: ClassVar = {
        **HybridConfig.hf_fields,
        "intermediate_size": "expert_features",
        "partial_rotary_factor": "rotary_fraction",
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        **FACTORS,
        **BALANCE_FIELDS,
    }
    hf_aliases: ClassVar = {
        "num_experts": "num_local_experts",
        "attn_type_list": "layer_types",
        **OTHER_FACTORS,
    }
    hf_values: ClassVar = {
        "hidden_act": ("silu",),
        "attention_dropout": (0,),
        "router_jitter_noise": (0,),
        "sliding_window": (None,),
        "postnorm": (True,),
        "shared_intermediate_size": (0,),
        "rope_type": ("default",),
        "tie_word_embeddings": (False, True),
    }
    hf_defaults: ClassVar = {"num_key_value_heads": 8, "num_local_experts": 8}

    block_types: tuple[str, ...] = (FULL, LINEAR)
    """The kinds of the blocks, from the lowest up. The pattern repeats."""
    # All blocks have experts.
    mlp_features: ClassVar[Any] = None  # pyright: ignore[reportIncompatibleVariableOverride]
    num_experts: int = 8
    """Number of experts in a block."""
    rope_theta: Positive = 1e6
    """θ of `ops.rotary`."""
    rotary_fraction: float = 1.0
    """The fraction of each head that rotary positions rotate."""
    epsilon: Positive = 1e-5
    """ε of the norms, except for those of the lightning attention."""
    full_alpha: float = 1.0
    """α of the full attention: the factor of its normed input."""
    full_beta: float = 1.0
    """β of the full attention: the factor of its output."""
    lightning_alpha: float = 1.0
    """α of the lightning attention."""
    lightning_beta: float = 1.0
    """β of the lightning attention."""
    mlp_alpha: float = 1.0
    """α of the experts."""
    mlp_beta: float = 1.0
    """β of the experts."""

    def build(self, **options: Unpack[NormOptions]) -> "MiniMaxLanguageModel":
        return MiniMaxLanguageModel(self, **options)

    @classmethod
    def converted(cls, given: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads `rotary_dim`, the number of rotated features. transformers 5.24 ignores it."""
        fields = super().converted(given, config)
        if "rotary_dim" not in given:
            return fields
        size = given.get("head_dim") or given["hidden_size"] // given["num_attention_heads"]
        rotated = checked_rotated("config: rotary_dim", given["rotary_dim"], size)
        # Keep the fraction of the file if it gives this number, so that the config.json is written
        # back unchanged.
        fraction = given.get("partial_rotary_factor", 1.0)
        return fields | {
            "rotary_fraction": fraction if round(size * fraction) == rotated else rotated / size
        }

    @classmethod
    def layer_types(cls, given: Mapping[str, Any]) -> Any:
        """The kind of each block, by default full attention in every other block.

        MiniMax's files have numbers: 0 for lightning attention, 1 for full attention.
        """
        kinds = [LINEAR if i % 2 else FULL for i in range(given["num_hidden_layers"])]
        numbers = {0: LINEAR, 1: FULL}
        return [numbers.get(kind, kind) for kind in given.get("layer_types", kinds)]

    def to_hf(self) -> dict[str, Any]:
        """Returns the config.json, which also states the number of rotated features."""
        rotated = {} if self.rotary_fraction == 1 else {"rotary_dim": self.rotary_features}
        return super().to_hf() | rotated

    @property
    def rotary_features(self) -> int:
        """The number of features of a head that `Attention` rotates."""
        return round(self.head_size * self.rotary_fraction)

    def block(self, kind: str, number: int, **options: Unpack[LayerOptions]) -> HybridBlock:
        """Builds a block, with the residual factors of its kind of mixer."""
        if kind == FULL:
            mixer, factors = self.attention(**options), (self.full_alpha, self.full_beta)
        else:
            place: Any = {"layer_index": number, "epsilon": 1e-6}
            mixer = self.make(LightningAttention, **place, **options)
            factors = self.lightning_alpha, self.lightning_beta
        factors = *factors, self.mlp_alpha, self.mlp_beta
        return self.block_of(mixer, kind, number, factors=factors, **options)

    @property
    def block_class(self) -> "type[MiniMaxBlock]":
        return MiniMaxBlock

    def attention(self, **options: Any) -> SequenceLayer:
        rotated = self.rotary_features
        theta = self.rope_theta if rotated else None
        return super().attention(rotary_features=rotated, rope_theta=theta, epsilon=None, **options)


class MiniMaxBlock(HybridBlock):
    """`n = norm(x)`, `x ← α n + β mixer(n)`, then the same with the experts and with their factors.

    The factors are α and β of the mixer, then those of the experts.
    """

    def __init__(
        self,
        mixer: SequenceLayer,
        mlp: Any,
        norm: Any,
        *,
        factors: tuple[float, float, float, float],
        **options: Any,
    ):
        super().__init__(mixer, mlp, norm, **options)
        self.factors = factors

    def sequence(self, x, state, rows):
        """Runs the mixer, then the experts, whose residuals are their normed inputs."""
        alpha, beta, mlp_alpha, mlp_beta = self.factors
        x = self.mixer_norm(x.astype(self.computation_dtype(x)))
        y, state = self.mixer.sequence(x, state, rows)
        x = self.mlp_norm(alpha * x + beta * y)
        return mlp_alpha * x + mlp_beta * self.mlp_of(rows)(x), state


class MiniMaxLanguageModel(HybridLanguageModel):
    """Token embedding → blocks with lightning or full attention → RMSNorm → head.

        >>> model = MiniMaxLanguageModelConfig(features=64).build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

        n = norm(x),   x ← α n + β mixer(n)
        n = norm(x),   x ← α n + β experts(n)

    The mixer is a `LightningAttention`, or in some blocks an `Attention` with rotary positions. The
    factors α and β of lightning attention, full attention and the `Experts` differ. The weights of
    a token's experts are the softmax over the chosen experts. The head is the token embedding, or a
    matrix of its own.

    Args:
        config: the sizes. `MiniMaxLanguageModelConfig.from_hf` reads them from a config.json.
        **options: as for every layer. Matrices are drawn from a normal distribution, as in
            transformers.

    Layouts: `hf` (transformers' MiniMaxForCausalLM) and `hf-file` (the files that it saves, in
    which experts have other keys, and which lack `lm_head.weight` if the head is tied). Both are
    written without the decays of the lightning attention, which transformers then computes.

    Source: MiniMax 2025 (MiniMax-01, arXiv 2501.08313); transformers' MiniMaxForCausalLM.

    """

    config: MiniMaxLanguageModelConfig


@layouts_of(LightningAttention)
def lightning_attention_layouts(layer: LightningAttention) -> Layouts:
    """`minimax`: the keys of transformers' MiniMaxLightningAttention.

    transformers also saves decays, which it recomputes if a file lacks them.
    """
    sizes = (layer.head_features,) * 3
    return {
        "minimax": [
            side_by_side(["q_proj", "k_proj", "v_proj"], "qkv_proj.weight", sizes, layer.num_heads),
            *rms_norm("norm", "norm"),
            *linear("out_proj", "out_proj", bias=False),
            *linear("g_proj", "output_gate", bias=False),
            *map(ignored, ("slope_rate", "query_decay", "key_decay", "diagonal_decay")),
        ]
    }
