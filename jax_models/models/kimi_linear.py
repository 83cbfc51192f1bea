"""Kimi Linear: Kimi Delta Attention, latent attention in every fourth block, and experts."""

__all__ = ["KimiLinearLanguageModel", "KimiLinearLanguageModelConfig"]

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple, Unpack

from jax_models.checks.values import Positive
from jax_models.layers.experts import Experts
from jax_models.layers.kimi_delta_attention import KimiDeltaAttention
from jax_models.layers.latent_attention import LatentAttention
from jax_models.models.architecture import Checkpoint, Fields
from jax_models.models.hf import kinds_by_key
from jax_models.models.hybrid import (
    FULL,
    LINEAR,
    BlockKeys,
    ExpertsKeys,
    GroupedExpertsConfig,
    HybridLanguageModel,
    experts_sizes,
    model_layouts,
)
from jax_models.options import Index, NormOptions
from jax_models.sequence import SequenceLayer

NORMS = ("input_layernorm", "post_attention_layernorm")


def experts_keys(mlp: str, matrices: tuple[str, ...], bias: str) -> ExpertsKeys:
    """The keys of a mixture of experts, which begin with `mlp`."""
    gate, up, down = (f"{mlp}.{key}" for key in matrices)
    return ExpertsKeys(f"{mlp}.gate.weight", gate, up, down, bias, f"{mlp}.shared_experts")


class HybridKeys(NamedTuple):
    """The keys that differ between the layouts of a block."""

    mixer: str
    A_log: str
    """The key of A in Kimi Delta Attention."""
    conv: str
    """The key of a convolution in Kimi Delta Attention."""
    mlp: str
    experts: ExpertsKeys


BIAS = "gate.e_score_correction_bias"
STACKED = ("experts.gate_up_proj", "experts.gate_up_proj", "experts.down_proj")
SINGLE = ("experts.{}.w1.weight", "experts.{}.w3.weight", "experts.{}.w2.weight")
EXPERTS = experts_keys("mlp", STACKED, f"mlp.{BIAS}")
FILE_EXPERTS = experts_keys("block_sparse_moe", SINGLE, f"block_sparse_moe.{BIAS}")
KEYS = HybridKeys("self_attn", "forget_gate.A_log", "conv1d", "mlp", EXPERTS)
FILE_KEYS = HybridKeys("self_attn", "A_log", "q_conv1d", "block_sparse_moe", FILE_EXPERTS)
MOONSHOT_KEYS = FILE_KEYS._replace(mlp="mlp")


def _block_keys(delta: str, keys: HybridKeys) -> dict[str, BlockKeys]:
    return {
        kind: BlockKeys(keys.mixer, *NORMS, layout, mlp=keys.mlp, experts=keys.experts)
        for kind, layout in ((LINEAR, delta), (FULL, "deepseek"))
    }


def latent_sizes(checkpoint: Checkpoint, mixer: str) -> Fields:
    """Reads the sizes of the latent attention, which has this name in the keys of a block."""
    num_heads = checkpoint.given("num_heads")
    blocks = checkpoint.in_blocks(f"*.{mixer}.kv_b_proj.weight")
    if not any(blocks):
        return {}
    # Other blocks also have a weight with the key of the queries.
    number = checkpoint.numbers[blocks.index(True)]
    attention = f"{checkpoint.layout.blocks}.{number}.{mixer}"
    latent = checkpoint.size(f"{attention}.kv_a_layernorm.weight", 0, rank=1)
    shared = checkpoint.size(f"{attention}.kv_a_proj_with_mqa.weight", 0, rank=2) - latent
    queries = checkpoint.first(f"{attention}.q_b_proj.weight", f"{attention}.q_proj.weight")
    own = checkpoint.size(queries, 0, rank=2) // num_heads - shared
    values = checkpoint.size(f"{attention}.kv_b_proj.weight", 0, rank=2) // num_heads - own
    low_rank = f"{attention}.q_a_layernorm.weight"
    return {
        "latent_features": latent,
        "key_features": own,
        "shared_features": shared,
        "value_features": values,
        "query_features": checkpoint.size(low_rank, 0) if checkpoint.has(low_rank) else None,
        "attention_bias": checkpoint.has(f"{attention}.kv_a_proj_with_mqa.bias"),
    }


def mixture_sizes(checkpoint: Checkpoint, mlp: str, experts: ExpertsKeys) -> Fields:
    """Reads the sizes of the MLPs and of the experts, which have these keys."""
    fields = dict(experts_sizes(checkpoint, experts))
    if checkpoint.has(dense := f"*.{mlp}.gate_proj.weight"):
        fields["mlp_features"] = checkpoint.size(dense, 0, rank=2)
    if fields["num_experts"]:
        shared = checkpoint.size(f"*.{experts.shared}.gate_proj.weight", 0, rank=2)
        fields["num_shared_experts"] = shared // fields["expert_features"]
        fields["num_dense_layers"] = checkpoint.in_blocks(f"*.{experts.router}").count(False)
    return fields


def hybrid_sizes(keys: HybridKeys, checkpoint: Checkpoint) -> Fields:
    """Reads the fields of the config from weights with these keys."""
    mixer, A_log, conv, mlp, experts = keys
    fields = {
        "block_types": kinds_by_key(checkpoint, f"*.{mixer}.{A_log}", LINEAR, FULL),
        **latent_sizes(checkpoint, mixer),
        **mixture_sizes(checkpoint, mlp, experts),
    }
    if not checkpoint.has(f"*.{mixer}.{A_log}"):
        return fields
    return fields | {
        "delta_heads": checkpoint.size(f"*.{mixer}.b_proj.weight", 0, rank=2),
        "delta_head_features": checkpoint.size(f"*.{mixer}.o_norm.weight", 0, rank=1),
        "kernel_size": checkpoint.size(f"*.{mixer}.{conv}.weight", 2, rank=3),
    }


SIZES, FILE_SIZES = partial(hybrid_sizes, KEYS), partial(hybrid_sizes, FILE_KEYS)
STATE_DICT, FILE = model_layouts("model", "norm", SIZES, FILE_SIZES)
MOONSHOT = FILE._replace(blocks_layout="hf-moonshot", sizes=partial(hybrid_sizes, MOONSHOT_KEYS))


@dataclasses.dataclass(frozen=True)
class KimiLinearLanguageModelConfig(GroupedExpertsConfig):
    """The config of Kimi Linear. Except for the sizes, the defaults are those of transformers."""

    family: ClassVar = "Kimi Linear"
    presets: ClassVar = {"kimi-linear": {}}
    model_types: ClassVar = ("kimi_linear",)
    marks: ClassVar = (".f_a_proj.",)
    kinds: ClassVar = (LINEAR, FULL)
    float32_keys: ClassVar = (".A_log", ".dt_bias", ".o_norm.weight", ".gate.weight", f".{BIAS}")
    block_keys: ClassVar = {
        "hf": _block_keys("kimi_linear", KEYS),
        "hf-file": _block_keys("kimi_linear-file", FILE_KEYS),
        "hf-moonshot": _block_keys("kimi_linear-file", MOONSHOT_KEYS),
    }
    layouts: ClassVar = {"hf": STATE_DICT, "hf-file": FILE, "hf-moonshot": MOONSHOT}
    hf_class: ClassVar = "KimiLinearForCausalLM"
    hf_fields: ClassVar = {
        "vocab_size": "vocab_size",
        "hidden_size": "features",
        "num_hidden_layers": "num_layers",
        "intermediate_size": "mlp_features",
        "num_attention_heads": "num_heads",
        "kv_lora_rank": "latent_features",
        "q_lora_rank": "query_features",
        "qk_nope_head_dim": "key_features",
        "qk_rope_head_dim": "shared_features",
        "v_head_dim": "value_features",
        "attention_bias": "attention_bias",
        "linear_num_heads": "delta_heads",
        "linear_head_dim": "delta_head_features",
        "linear_conv_kernel_dim": "kernel_size",
        "num_experts": "num_experts",
        "num_experts_per_token": "experts_per_token",
        "moe_intermediate_size": "expert_features",
        "num_shared_experts": "num_shared_experts",
        "routed_scaling_factor": "experts_scale",
        "moe_renormalize": "normalize_experts",
        "num_expert_group": "num_expert_groups",
        "topk_group": "expert_groups_per_token",
        "rms_norm_eps": "epsilon",
        "initializer_range": "initializer_range",
    }
    # The names in transformers' classes, and those in the published config.json
    hf_aliases: ClassVar = {
        "n_group": "num_expert_group",
        "n_shared_experts": "num_shared_experts",
        "norm_topk_prob": "moe_renormalize",
        "num_experts_per_tok": "num_experts_per_token",
        "num_local_experts": "num_experts",
    }
    hf_values: ClassVar = {
        "hidden_act": ("silu",),
        "attention_dropout": (0,),
        "mla_use_nope": (True,),
        "moe_layer_freq": (1,),
        "moe_router_activation_func": ("sigmoid",),
    }
    hf_defaults: ClassVar = {
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "linear_num_heads": 32,
        "linear_head_dim": 128,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "moe_intermediate_size": 1024,
    }

    block_types: tuple[str, ...] = (LINEAR,) * 3 + (FULL,)
    """The kinds of the blocks, from the lowest up. The pattern repeats."""
    # Keys and values have as many heads as queries.
    num_kv_heads: ClassVar[Any] = None  # pyright: ignore[reportIncompatibleVariableOverride]
    # The parts of a head have sizes of their own.
    head_features: ClassVar = None  # pyright: ignore[reportIncompatibleVariableOverride]
    # There are no positions.
    rope_theta: ClassVar = None  # pyright: ignore[reportIncompatibleVariableOverride]
    # transformers ignores tie_word_embeddings.
    tied_head: ClassVar = False  # pyright: ignore[reportIncompatibleVariableOverride]
    latent_features: int = 64
    """Size of the latent c, from which a latent attention computes keys and values."""
    key_features: int = 32
    """Size of the part of a head's key that is computed from c."""
    shared_features: int = 16
    """Size of the part of a key that all heads share."""
    value_features: int = 32
    """Size of a head of the latent attention's values."""
    query_features: int | None = None
    """Size of the latent from which queries are computed. None: they are computed from x."""
    attention_bias: bool = False
    """Whether the projections of the latent attention to latents and from heads have biases."""
    delta_heads: int = 4
    """Number of heads of a Kimi Delta Attention."""
    delta_head_features: int = 32
    """Size of each head of Kimi Delta Attention."""
    kernel_size: int = 4
    """Number of taps of the causal convolutions."""
    num_experts: Index = 8
    """Number of experts in a block, without the shared ones. 0: all blocks have MLPs."""
    num_shared_experts: int = 1
    """Number of shared experts, which process every token. They are stored as one MLP that is this
    many times as wide as an expert.
    """
    num_dense_layers: Index = 1
    """Number of the lowest blocks that have MLPs even if all other blocks have experts."""
    experts_scale: Positive = 2.446
    """The factor of the weights of the experts."""
    epsilon: Positive = 1e-5
    """ε of the norms, except for those of latents."""

    def build(self, **options: Unpack[NormOptions]) -> "KimiLinearLanguageModel":
        return KimiLinearLanguageModel(self, **options)

    @classmethod
    def converted(cls, given: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        heads = given["num_attention_heads"]
        if given.get("num_key_value_heads", heads) != heads:
            raise ValueError(
                f"config: num_key_value_heads: expected num_attention_heads={heads}, got "
                f"{given['num_key_value_heads']}"
            )
        # In published files, the sizes of Kimi Delta Attention are nested under
        # `linear_attn_config`.
        names = {
            "num_heads": "delta_heads",
            "head_dim": "delta_head_features",
            "short_conv_kernel_size": "kernel_size",
        }
        linear = given.get("linear_attn_config", {})
        return {
            **super().converted(given, config),
            **{ours: linear[name] for name, ours in names.items() if name in linear},
            "num_dense_layers": cls._num_dense_layers(given),
        }

    @classmethod
    def _num_dense_layers(cls, given: Mapping[str, Any]) -> int:
        """The number of the lowest blocks that have MLPs. All others have experts."""
        num_layers = given["num_hidden_layers"]
        dense = given.get("first_k_dense_replace", cls.num_dense_layers)
        default = ["dense" if i < dense else "sparse" for i in range(num_layers)]
        kinds = given.get("mlp_layer_types", default)
        dense = kinds.count("dense")
        if kinds != ["dense"] * dense + ["sparse"] * (num_layers - dense):
            raise ValueError(
                "config: mlp_layer_types: expected num_hidden_layers entries, first dense and then "
                f"sparse, got {kinds}"
            )
        return dense

    @classmethod
    def layer_types(cls, given: Mapping[str, Any]) -> Any:
        """The kind of each block. Published files list the blocks of each kind, counted from 1."""
        num_layers, linear = given["num_hidden_layers"], given.get("linear_attn_config", {})
        if "layer_types" in given:
            return given["layer_types"]
        if not {"kda_layers", "full_attn_layers"} <= linear.keys():
            return [FULL if i and i % 4 == 0 else LINEAR for i in range(num_layers)]
        numbers, full = range(1, num_layers + 1), linear["full_attn_layers"]
        listed = [*linear["kda_layers"], *full]
        missing = [i for i in numbers if i not in listed]
        repeated = [i for i in numbers if listed.count(i) > 1]
        if missing or repeated:
            raise ValueError(
                f"config: linear_attn_config: expected each of 1 … {num_layers} once in kda_layers "
                f"or full_attn_layers, missing {missing}, more than once {repeated}"
            )
        return [FULL if i in full else LINEAR for i in numbers]

    def to_hf(self) -> dict[str, Any]:
        """Returns the config.json, which has no rotary positions."""
        kinds = ["sparse" if self.has_experts(i) else "dense" for i in range(self.num_layers)]
        fields = super().to_hf()
        del fields["rope_parameters"]
        return fields | {"num_key_value_heads": self.num_heads, "mlp_layer_types": kinds}

    def has_experts(self, number: int) -> bool:
        return self.num_experts > 0 and number >= self.num_dense_layers

    def attention(self, **options: Any) -> SequenceLayer:
        # The ε of the norms of latents is always 1e-6, as in transformers.
        return self.make(LatentAttention, epsilon=1e-6, use_bias=self.attention_bias, **options)

    def mixer(self, **options: Any) -> SequenceLayer:
        sizes = {"num_heads": self.delta_heads, "head_features": self.delta_head_features}
        return self.make(KimiDeltaAttention, **sizes, **options)

    def experts(self, **options: Any) -> Experts:
        shared = self.num_shared_experts * self.expert_features
        return super().experts(shared_features=shared, **options)


class KimiLinearLanguageModel(HybridLanguageModel):
    """Token embedding → blocks with Kimi Delta Attention or latent attention → RMSNorm → Linear.

        >>> model = KimiLinearLanguageModelConfig(features=64).build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

        x ← x + mixer(norm(x)),   x ← x + experts(norm(x))

    The mixer is a `KimiDeltaAttention`, or in every fourth block a `LatentAttention` without
    positions. The router of the `Experts` scores them with a sigmoid, and adds a bias to choose
    among them. A shared expert is added. The lowest `num_dense_layers` blocks have a `GatedMLP`
    with silu instead of experts.

    Args:
        config: the sizes. `KimiLinearLanguageModelConfig.from_hf` reads them from a config.json.
        **options: as for every layer. Matrices and convolutions are drawn from a normal
            distribution, the rest as in `KimiDeltaAttention`, which is as in transformers.

    Layouts: `hf` (transformers' KimiLinearForCausalLM), `hf-moonshot` (the published files), and
    `hf-file` (the files that transformers saves, in which also the MLPs of the lowest blocks are
    called `block_sparse_moe`).

    """
