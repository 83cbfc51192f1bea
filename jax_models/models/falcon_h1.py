"""Falcon-H1: Mamba-2 and attention side by side in each block, with multipliers."""

__all__ = ["FalconH1LanguageModel", "FalconH1LanguageModelConfig", "FalconH1State"]

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Unpack

from jax_models.checks.values import Positive
from jax_models.layers.attention import Attention
from jax_models.layers.mamba2 import Mamba2
from jax_models.layers.mlp import GatedMLP
from jax_models.models.architecture import Checkpoint, Fields, Mark
from jax_models.models.hybrid import (
    BlockKeys,
    HybridLanguageModel,
    model_layouts,
)
from jax_models.models.mamba2_hybrid import Mamba2HybridConfig, mamba2_hybrid_sizes
from jax_models.options import LayerOptions, NormOptions
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, nested

HYBRID = "hybrid"
"""The kind of all blocks."""
MULTIPLIERS = {
    "embedding_multiplier": "embedding_multiplier",
    "lm_head_multiplier": "head_multiplier",
    "key_multiplier": "key_multiplier",
    "attention_in_multiplier": "attention_in_multiplier",
    "attention_out_multiplier": "attention_out_multiplier",
    "ssm_in_multiplier": "mamba_in_multiplier",
    "ssm_out_multiplier": "mamba_out_multiplier",
    "ssm_multipliers": "mamba_multipliers",
    "mlp_multipliers": "mlp_multipliers",
}
"""The names of the multipliers in a config.json, and in our config."""


def _sizes(checkpoint: Checkpoint) -> Fields:
    return {
        "mlp_features": checkpoint.size("*.feed_forward.gate_proj.weight", 0, rank=2),
        "mlp_bias": checkpoint.has("*.feed_forward.gate_proj.bias"),
        **{name: checkpoint.given(name) for name in MULTIPLIERS.values()},
        **mamba2_hybrid_sizes(checkpoint, "self_attn", "mamba"),
        "mamba_out_bias": checkpoint.has("*.mamba.out_proj.bias"),
        "mamba_norm": checkpoint.has("*.mamba.norm.weight"),
    }


LAYOUT, FILE = model_layouts("model", "final_layernorm", _sizes)


@dataclasses.dataclass(frozen=True)
class FalconH1LanguageModelConfig(Mamba2HybridConfig):
    """The config of Falcon-H1. Except for the sizes, the defaults are those of transformers."""

    family: ClassVar = "Falcon-H1"
    presets: ClassVar = {
        "falcon-h1": {
            "model.embedding_multiplier": 5.0,
            "model.head_multiplier": 0.125,
            "model.key_multiplier": 0.5,
            "model.mlp_multipliers": (0.75, 0.5),
        }
    }
    model_types: ClassVar = ("falcon_h1",)
    marks: ClassVar = (Mark((".layers.0.mamba.dt_bias", ".layers.0.self_attn.")),)
    kinds: ClassVar = (HYBRID,)
    block_keys: ClassVar = {
        "hf": {
            HYBRID: BlockKeys(
                "", "input_layernorm", "pre_ff_layernorm", "falcon_h1", "feed_forward"
            )
        }
    }
    layouts: ClassVar = {"hf": LAYOUT, "hf-file": FILE}
    hf_class: ClassVar = "FalconH1ForCausalLM"
    hf_fields: ClassVar = (
        Mamba2HybridConfig.hf_fields
        | {
            "mlp_bias": "mlp_bias",
            "projectors_bias": "mamba_out_bias",
            "mamba_rms_norm": "mamba_norm",
            "mamba_norm_before_gate": "norm_before_gate",
        }
        | MULTIPLIERS
    )
    hf_defaults: ClassVar = {
        **Mamba2HybridConfig.hf_defaults,
        "mamba_d_ssm": 1024,
        "num_key_value_heads": 8,
    }

    epsilon: Positive = 1e-5
    """ε of the norms."""
    # All blocks are of one kind.
    block_types: ClassVar = (HYBRID,)  # pyright: ignore[reportIncompatibleVariableOverride]
    mlp_bias: bool = False
    """Whether the projections of the MLPs have biases."""
    mamba_out_bias: bool = False
    """Whether the last projection of a Mamba-2 has a bias. `mamba_bias` is for the others."""
    mamba_norm: bool = False
    """Whether a Mamba-2 norms its output."""
    norm_before_gate: bool = True
    """Whether this norm comes before the gate."""
    embedding_multiplier: float = 1.0
    """The factor by which the token embeddings are multiplied."""
    head_multiplier: float = 1.0
    """The factor by which the logits are multiplied."""
    key_multiplier: Positive = 1.0
    """The factor by which the attention's keys are multiplied."""
    attention_in_multiplier: float = 1.0
    """The factor by which the inputs of the attention are multiplied."""
    attention_out_multiplier: float = 1.0
    """The factor by which the outputs of the attention are multiplied."""
    mamba_in_multiplier: float = 1.0
    """The factor by which the inputs of a Mamba-2 are multiplied."""
    mamba_out_multiplier: float = 1.0
    """The factor by which the outputs of a Mamba-2 are multiplied."""
    mamba_multipliers: tuple[float, ...] = (1.0,) * 5
    """The factors of the outputs of the projections to z, u, B, C and Δ in a Mamba-2."""
    mlp_multipliers: tuple[float, ...] = (1.0,) * 2
    """The factors by which the gates of the MLPs, before silu, and their outputs are multiplied."""

    def __post_init__(self):
        super().__post_init__()
        for name, count in (("mamba_multipliers", 5), ("mlp_multipliers", 2)):
            values = getattr(self, name)
            if not isinstance(values, list | tuple) or {*map(type, values)} - {int, float}:
                raise TypeError(f"{name}: expected {count} numbers, got {values!r}")
            if len(values) != count:
                raise ValueError(f"{name}: expected {count} numbers, got {len(values)}")
            object.__setattr__(self, name, tuple(map(float, values)))

    def build(self, **options: Unpack[NormOptions]) -> "FalconH1LanguageModel":
        return FalconH1LanguageModel(self, **options)

    @classmethod
    def converted(cls, given: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        fields = super().converted(given, config)
        del fields["block_types"]
        return fields

    @classmethod
    def inner_features(cls, given: Mapping[str, Any], config: Mapping[str, Any]) -> int:
        """The stated width, unless it is null."""
        width = config.get("mamba_d_ssm", given["mamba_d_ssm"])
        return super().inner_features(given, config) if width is None else width

    def inner_to_hf(self) -> dict[str, Any]:
        return {"mamba_d_ssm": self.mamba_heads * self.mamba_head_features}

    @classmethod
    def layer_types(cls, given: Mapping[str, Any]) -> Any:
        """All blocks are of one kind."""
        return [HYBRID] * given["num_hidden_layers"]

    def to_hf(self) -> dict[str, Any]:
        """Returns the config.json, which does not list the kinds of the blocks."""
        fields = super().to_hf()
        del fields["layer_types"]
        return fields

    def attention(self, **options: Any) -> SequenceLayer:
        """Builds the attention. Scaling the keys scales the scores by the same factor."""
        scale = self.key_multiplier / math.sqrt(self.head_size)
        return super().attention(scale=scale, **options)

    def mixer(self, **options: Any) -> SequenceLayer:
        """Builds the two mixers of a block."""
        mamba = super().mixer(
            out_bias=self.mamba_out_bias,
            use_norm=self.mamba_norm,
            norm_before_gate=self.norm_before_gate,
            **options,
        )
        assert isinstance(mamba, Mamba2)
        projections = mamba.z_proj, mamba.u_proj, mamba.B_proj, mamba.C_proj, mamba.dt_proj
        for projection, multiplier in zip(projections, self.mamba_multipliers, strict=True):
            projection.scale = multiplier
        attention = self.attention(**options)
        assert isinstance(attention, Attention)
        return FalconH1Mixer(self, mamba, attention, **options)

    def mlp(self, **options: Any) -> GatedMLP:
        mlp = GatedMLP(
            self.features, self.mlp_features, use_bias=self.mlp_bias, activation="silu", **options
        )
        mlp.gate_proj.scale, mlp.down_proj.scale = self.mlp_multipliers
        return mlp


class FalconH1State(NamedTuple):
    """The states of the two mixers of a block."""

    mamba: Any
    """A `Mamba2State`."""
    attention: Any
    """A `LocalAttentionState`."""


class FalconH1Mixer(SequenceLayer[FalconH1State]):
    """`y = m_out · mamba(m_in · x) + a_out · attention(a_in · x)`.

    m and a are the multipliers of the Mamba-2 and of the attention in the config.
    """

    divides_time = True

    def __init__(
        self,
        config: FalconH1LanguageModelConfig,
        mamba: Mamba2,
        attention: Attention,
        **options: Unpack[LayerOptions],
    ):
        super().__init__(config.features, **options)
        self.config, self.mamba, self.attention = config, mamba, attention

    def init_state(self, batch_size: int) -> FalconH1State:
        """The states of the Mamba-2 and of the attention."""
        mamba, attention = self.mamba, self.attention
        return FalconH1State(mamba.init_state(batch_size), attention.init_state(batch_size))

    def start(self, batch_size: int) -> FalconH1State:
        return FalconH1State(self.mamba.start(batch_size), self.attention.start(batch_size))

    def sequence(self, x, state, rows):
        """Runs both mixers on x, and adds their outputs."""
        c = self.config
        y, mamba = self.mamba.sequence(c.mamba_in_multiplier * x, state.mamba, rows)
        z, attention = self.attention.sequence(c.attention_in_multiplier * x, state.attention, rows)
        y = c.mamba_out_multiplier * y + c.attention_out_multiplier * z
        return y, FalconH1State(mamba, attention)

    def torch_layouts(self) -> Layouts:
        """`falcon_h1`: the keys of the two mixers in transformers' FalconH1DecoderLayer."""
        mamba, attention = self.mamba.torch_layouts(), self.attention.torch_layouts()
        return {
            "falcon_h1": [
                *nested(mamba["mamba2"], "mamba", "mamba"),
                *nested(attention["llama"], "attention", "self_attn"),
            ]
        }


class FalconH1LanguageModel(HybridLanguageModel):
    """Token embedding → blocks with Mamba-2 and attention → RMSNorm → head.

        >>> model = FalconH1LanguageModelConfig(features=64, num_heads=2).build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

        x = embedding_multiplier · embedding(tokens)
        n = norm(x)
        x ← x + mamba_out_multiplier · mamba(mamba_in_multiplier · n)
              + attention_out_multiplier · attention(attention_in_multiplier · n)
        x ← x + mlp(norm(x))
        logits = head_multiplier · head(norm(x))

    Each block has a `Mamba2` and an `Attention` that read the same input, and a `GatedMLP` with
    silu. Inside the mixers and the MLP, key_multiplier multiplies the keys, the five
    mamba_multipliers z, u, B, C and Δ, and the two mlp_multipliers the gate before silu and the
    output. The head is the token embedding, or a matrix of its own. The multipliers are applied
    when the model runs, so that the weights are those of the checkpoint.

    Args:
        config: the sizes. `FalconH1LanguageModelConfig.from_hf` reads them from a config.json.
        **options: as for every layer. Matrices and convolutions are drawn from a normal
            distribution, `dt_bias` is one, and the other parameters start as in `Mamba2`, as in
            transformers.

    Layouts: `hf` (transformers' FalconH1ForCausalLM) and `hf-file` (the same without
    `lm_head.weight` if the head is tied).

    """

    config: FalconH1LanguageModelConfig

    def embed(self, tokens, positions):
        """Returns the multiplied embeddings."""
        return self.config.embedding_multiplier * super().embed(tokens, positions)

    def unembed(self, x):
        """Maps the normalized output of the blocks to logits, and multiplies them."""
        return self.config.head_multiplier * super().unembed(x)
