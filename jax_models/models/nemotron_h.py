"""Nemotron-H: blocks with one part each, a Mamba-2, attention, an MLP or a mixture of experts."""

__all__ = ["NemotronHLanguageModel", "NemotronHLanguageModelConfig"]

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Unpack

from jax_models.checks.values import Positive
from jax_models.layers.attention import Attention
from jax_models.layers.experts import Experts
from jax_models.layers.gated_delta_net import bias_of_log_uniform
from jax_models.layers.linear import torch_uniform
from jax_models.layers.mamba2 import Mamba2
from jax_models.layers.mlp import MLP
from jax_models.models.architecture import Checkpoint, Fields, Layout
from jax_models.models.hf import shortest_pattern
from jax_models.models.hybrid import (
    FULL,
    HEAD,
    LINEAR,
    OLDER_KINDS,
    GroupedExpertsConfig,
    HybridLanguageModel,
)
from jax_models.models.mamba2_hybrid import Mamba2HybridConfig, mamba2_hybrid_sizes
from jax_models.models.state_space import StateSpaceBlock
from jax_models.options import LayerOptions, NormOptions
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, Table, linear, nested, rms_norm

MOE, ONLY_MLP = "moe", "mlp"
"""The kinds of the blocks with a mixture of experts and with an MLP."""
LETTERS = {"M": LINEAR, "*": FULL, "-": ONLY_MLP, "E": MOE}
"""The letters of a `hybrid_override_pattern`."""
KEY_OF_KIND = {
    LINEAR: "*.mixer.A_log",
    FULL: "*.mixer.q_proj.weight",
    MOE: "*.mixer.gate.weight",
}
"""The key by which a block of each kind is recognized. All others have an MLP."""
OTHER_MIXERS = (".mixer.q_proj.", ".mixer.up_proj.", ".mixer.experts.")
"""Parts of the keys of the mixers that are no Mamba-2."""


def _block_types(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The pattern of the kinds of blocks, from the keys of each block."""
    found = {kind: checkpoint.in_blocks(key) for kind, key in KEY_OF_KIND.items()}
    return shortest_pattern(
        [
            next((kind for kind, blocks in found.items() if blocks[i]), ONLY_MLP)
            for i in range(len(checkpoint.numbers))
        ]
    )


def _sizes(up: str, expert_axis: int, checkpoint: Checkpoint) -> Fields:
    """Reads the sizes of a layout in which experts' first matrices have the key `up`.

    `expert_axis` is the axis of an expert's width in this matrix.
    """
    fields = {
        **mamba2_hybrid_sizes(checkpoint, "mixer", "mixer"),
        "block_types": _block_types(checkpoint),
        "mlp_bias": False,
    }
    # `mlp_bias` is one option for MLPs and shared experts, and a model may lack either.
    for name, part in (("mlp_features", ""), ("shared_features", "shared_experts.")):
        if checkpoint.has(f"*.mixer.{part}up_proj.weight"):
            fields[name] = checkpoint.size(f"*.mixer.{part}up_proj.weight", 0, rank=2)
            fields["mlp_bias"] |= checkpoint.has(f"*.mixer.{part}up_proj.bias")
    if not checkpoint.has(KEY_OF_KIND[MOE]):
        return fields
    latent = "*.mixer.fc1_latent_proj.weight"
    return fields | {
        "num_experts": checkpoint.size(KEY_OF_KIND[MOE], 0, rank=2),
        "experts_per_token": checkpoint.given("experts_per_token"),
        "expert_features": checkpoint.size(f"*.mixer.{up}", expert_axis, rank=expert_axis + 2),
        "latent_features": checkpoint.size(latent, 0, rank=2) if checkpoint.has(latent) else None,
    }


def _layout(model: str, up: str, expert_axis: int) -> Layout:
    return Layout(
        f"{model}.embeddings.weight",
        f"{model}.layers",
        f"{model}.norm_f.weight",
        HEAD,
        sizes=partial(_sizes, up, expert_axis),
    )


STATE_DICT = _layout("model", "experts.up_proj", 1)
FILE = _layout("backbone", "experts.0.up_proj.weight", 0)


@dataclasses.dataclass(frozen=True)
class NemotronHLanguageModelConfig(Mamba2HybridConfig, GroupedExpertsConfig):
    """The config of Nemotron-H. Except for the sizes, the defaults are those of transformers."""

    family: ClassVar = "Nemotron-H"
    presets: ClassVar = {"nemotron-h": {"model.block_types": (LINEAR, ONLY_MLP, FULL, ONLY_MLP)}}
    model_types: ClassVar = ("nemotron_h",)
    marks: ClassVar = OTHER_MIXERS
    left_out: ClassVar = ("mtp.",)
    kinds: ClassVar = (LINEAR, FULL, ONLY_MLP, MOE)
    float32_keys: ClassVar = tuple(
        f".mixer.{name}"
        for name in ("A_log", "D", "dt_bias", "gate.weight", "gate.e_score_correction_bias")
    )
    layouts: ClassVar = {"hf": STATE_DICT, "hf-file": FILE}
    hf_class: ClassVar = "NemotronHForCausalLM"
    hf_fields: ClassVar = {
        "vocab_size": "vocab_size",
        "hidden_size": "features",
        "intermediate_size": "mlp_features",
        "mlp_bias": "mlp_bias",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "head_dim": "head_features",
        "mamba_num_heads": "mamba_heads",
        "mamba_head_dim": "mamba_head_features",
        "ssm_state_size": "state_features",
        "n_groups": "num_groups",
        "conv_kernel": "kernel_size",
        "use_bias": "mamba_bias",
        "use_conv_bias": "conv_bias",
        "time_step_limit": "dt_limits",
        "time_step_min": "dt_min",
        "time_step_max": "dt_max",
        "time_step_floor": "dt_floor",
        "rescale_prenorm_residual": "rescale_residual",
        "n_routed_experts": "num_experts",
        "num_experts_per_tok": "experts_per_token",
        "moe_intermediate_size": "expert_features",
        "moe_shared_expert_intermediate_size": "shared_features",
        "moe_latent_size": "latent_features",
        "routed_scaling_factor": "experts_scale",
        "norm_topk_prob": "normalize_experts",
        "n_group": "num_expert_groups",
        "topk_group": "expert_groups_per_token",
        "layer_norm_epsilon": "epsilon",
        "initializer_range": "initializer_range",
    }
    # Names in older files
    hf_aliases: ClassVar = {
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_dt_min": "time_step_min",
        "mamba_dt_max": "time_step_max",
        "mamba_dt_init_floor": "time_step_floor",
        "mamba_dt_limit": "time_step_limit",
    }
    hf_sizes: ClassVar = ("vocab_size", "hidden_size", "num_attention_heads")
    hf_values: ClassVar = {
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": ("silu", "swish"),
        "attention_dropout": (0,),
        "sliding_window": (None,),
    }
    hf_defaults: ClassVar = {
        "intermediate_size": 21_504,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "n_routed_experts": 8,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
    }

    block_types: tuple[str, ...] = (LINEAR, MOE, FULL, ONLY_MLP)
    """The kinds of the blocks, from the lowest up. The pattern repeats."""
    mlp_bias: bool = False
    """Whether MLPs, shared experts and the projections around the experts have biases."""
    head_features: int = 64
    """Size of a head of the attention."""
    # transformers has no positions and no biases of the attention, and ignores tie_word_embeddings.
    rope_theta: ClassVar = None  # pyright: ignore[reportIncompatibleVariableOverride]
    attention_bias: ClassVar = False  # pyright: ignore[reportIncompatibleVariableOverride]
    tied_head: ClassVar = False  # pyright: ignore[reportIncompatibleVariableOverride]
    num_experts: int = 8
    """Number of experts in a block with experts, without the shared one."""
    shared_features: int = 128
    """Width of the shared expert."""
    latent_features: int | None = None
    """Size of the input and the output of each expert, which two projections connect to the width
    of the model. None: the width of the model, without projections.
    """
    dt_min: Positive = 0.001
    """The least initial Δ."""
    dt_max: Positive = 0.1
    """The greatest initial Δ."""
    dt_floor: Positive = 1e-4
    """The lower bound of each initial Δ after it is drawn."""
    epsilon: Positive = 1e-5
    """ε of the norms."""
    rescale_residual: bool = True
    """Whether the initial output projections of the Mamba-2s are divided by √num_layers."""

    def build(self, **options: Unpack[NormOptions]) -> "NemotronHLanguageModel":
        return NemotronHLanguageModel(self, **options)

    @classmethod
    def converted(cls, given: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        # transformers ignores `num_hidden_layers`: the list of kinds determines it.
        num_layers = len(cls.layer_types(given))
        sizes = {
            "num_hidden_layers": num_layers,
            "mamba_n_heads": given["mamba_num_heads"],
            "mamba_d_head": given["mamba_head_dim"],
        }
        return super().converted(given | sizes, config) | {"num_layers": num_layers}

    @classmethod
    def inner_features(cls, given: Mapping[str, Any], config: Mapping[str, Any]) -> int:
        """All heads together. transformers ignores `expand`."""
        return given["mamba_num_heads"] * given["mamba_head_dim"]

    def inner_to_hf(self) -> dict[str, Any]:
        return {}

    @classmethod
    def layer_types(cls, given: Mapping[str, Any]) -> Any:
        """The list of the kinds, or in older files a string with a letter for each block."""
        types = given.get("layers_block_type") or given.get("layer_types")
        if types is not None:
            return [OLDER_KINDS.get(kind, kind) for kind in types]
        pattern = given.get("hybrid_override_pattern") or "ME*-"
        return [LETTERS.get(letter, letter) for letter in pattern]

    def to_hf(self) -> dict[str, Any]:
        """Returns the config.json, which has no rotary positions."""
        fields = super().to_hf()
        del fields["rope_parameters"]
        return {"layers_block_type" if k == "layer_types" else k: v for k, v in fields.items()}

    def block(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, kind: str, number: int, **options: Unpack[LayerOptions]
    ) -> "NemotronHBlock":
        build: dict[str, Any] = {
            LINEAR: self.mixer,
            FULL: self.attention,
            MOE: self.experts,
            ONLY_MLP: self.plain_mlp,
        }
        return NemotronHBlock(self, build[kind], **options)

    def attention(self, **options: Any) -> SequenceLayer:
        return super().attention(rotary_features=0, rope_theta=None, **options)

    def mixer(self, **options: Any) -> SequenceLayer:
        inner = self.mamba_heads * self.mamba_head_features
        residual = torch_uniform(inner * self.num_layers)
        return self.make(
            Mamba2,
            num_heads=self.mamba_heads,
            head_features=self.mamba_head_features,
            use_bias=self.mamba_bias,
            dt_init=bias_of_log_uniform(self.dt_min, self.dt_max, self.dt_floor),
            out_init=residual if self.rescale_residual else None,
            **options,
        )

    def experts(self, **options: Any) -> Experts:
        return super().experts(
            activation="relu2",
            gated=False,
            use_bias=self.mlp_bias,
            latent_features=self.latent_features,
            shared_features=self.shared_features,
            **options,
        )

    def plain_mlp(self, **options: Any) -> MLP:
        """Builds the MLP of a block."""
        return MLP(self.features, self.mlp_features, use_bias=self.mlp_bias, **options)


class NemotronHBlock(StateSpaceBlock):
    """`x ← x + mixer(norm(x))`. The mixer is one of four, and MLPs and experts have no state."""

    def torch_layouts(self) -> Layouts:
        """`hf` and `hf-file`, which differ in the keys of the experts."""
        norm = rms_norm("norm", "norm")
        stacked, single = "experts.{}_proj", "experts.{{}}.{}_proj.weight"
        return {
            layout: [
                *norm,
                *nested(self._rows(key.format("up"), key.format("down")), "mixer", "mixer"),
            ]
            for layout, key in (("hf", stacked), ("hf-file", single))
        }

    def _rows(self, up: str, down: str) -> Table:
        """The rows of the mixer, with these keys of the experts' matrices."""
        mixer: Any = self.mixer
        if isinstance(mixer, Mamba2):
            return mixer.torch_layouts()["mamba2"]
        if isinstance(mixer, Attention):
            return mixer.torch_layouts()["llama"]
        if isinstance(mixer, MLP):
            return mixer.rows("up_proj", "down_proj")
        rows = mixer.rows("gate.weight", None, up, down, "gate.e_score_correction_bias")
        rows += nested(mixer.shared.rows("up_proj", "down_proj"), "shared", "shared_experts")
        if mixer.latent_in is None:
            return rows
        bias = mixer.latent_in.use_bias
        rows += linear("latent_in", "fc1_latent_proj", bias=bias)
        return rows + linear("latent_out", "fc2_latent_proj", bias=bias)


class NemotronHLanguageModel(HybridLanguageModel):
    """Token embedding → blocks with one part each → RMSNorm → head.

        >>> model = NemotronHLanguageModelConfig(features=64, num_heads=2).build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

        x ← x + mixer(norm(x))

    The mixer of a block is a `Mamba2`, an `Attention` without positions, an `MLP` with the square
    of the relu, or a mixture of such `Experts` beside a shared one. The router scores experts with
    a sigmoid, and adds a bias to choose among them. With `latent_features`, the experts work on a
    projection of x, and their sum is projected back.

    Args:
        config: the sizes. `NemotronHLanguageModelConfig.from_hf` reads them from a config.json.
        **options: as for every layer. Matrices start as in transformers.

    Layouts: `hf` (transformers' NemotronHForCausalLM) and `hf-file` (the files that it saves and
    that NVIDIA published, whose keys begin with `backbone` and number the experts).

    """

    config: NemotronHLanguageModelConfig
