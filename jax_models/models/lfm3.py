"""Liquid AI's LFM3: gated short convolutions, and attention to a window or to the whole text."""

__all__ = ["LFM3LanguageModel", "LFM3LanguageModelConfig"]

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Self, Unpack

from jax_models.checks.values import Positive
from jax_models.layers.attention import Attention
from jax_models.models.architecture import Checkpoint, Fields, Mark
from jax_models.models.hf import ROTARY
from jax_models.models.hybrid import (
    FULL,
    SLIDING,
    BlockKeys,
    HybridBlock,
    HybridLanguageModel,
    WindowConfig,
    model_layouts,
)
from jax_models.models.lfm2 import HF_FIELDS, LATER_PARTS, PROJECTIONS, ConvConfig, conv_sizes
from jax_models.options import NormOptions
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, layouts_of

ROTATION = {
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
}
"""The `rope_parameters` that transformers assumes if a config.json has none."""
GATES = {"hf": "g_proj", "hf-file": "gate_proj"}
"""The key of the gate of an attention's heads in each layout."""


def _rotation(stated: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary parameters of a kind of attention, of which a config.json may state only some."""
    whole = {"partial_rotary_factor": 1.0}
    # Both kinds have this θ if only other parameters are stated.
    rotation = {"rope_type": "default", "rope_theta": 1e6, **whole, **stated}
    # The default type rotates whole heads, whatever the fraction is.
    return rotation | (whole if rotation["rope_type"] == "default" else {})


def _block_keys(attention: str) -> dict[str, BlockKeys]:
    mixers = {"conv": ("conv", "lfm2"), FULL: ("self_attn", attention)}
    mixers[SLIDING] = mixers[FULL]
    return {
        kind: BlockKeys(
            key,
            "operator_norm",
            "ffn_norm",
            layout,
            "feed_forward",
            PROJECTIONS,
            out_norms=("post_operator_norm", "post_ffn_norm"),
        )
        for kind, (key, layout) in mixers.items()
    }


def _sizes(gate: str, checkpoint: Checkpoint) -> Fields:
    return {
        **conv_sizes(checkpoint, "q_norm"),
        "block_types": checkpoint.given("block_types"),  # both kinds of attention have these keys
        "sandwich_norm": checkpoint.has("*.post_operator_norm.weight"),
        "head_gate": checkpoint.has(f"*.self_attn.{gate}.weight"),
        "attention_bias": checkpoint.has("*.self_attn.q_proj.bias"),
    }


SIZES, FILE_SIZES = (partial(_sizes, gate) for gate in GATES.values())
STATE_DICT, FILE = model_layouts("model", "embedding_norm", SIZES, FILE_SIZES)


@dataclasses.dataclass(frozen=True)
class LFM3LanguageModelConfig(ConvConfig, WindowConfig):
    """The config of LFM3. Except for the sizes, the defaults are those of transformers."""

    family: ClassVar = "LFM3"
    presets: ClassVar = {"lfm3": {}}
    model_types: ClassVar = ("lfm3",)
    marks: ClassVar = tuple(Mark(("model.embedding_norm.", part)) for part in LATER_PARTS)
    kinds: ClassVar = ("conv", SLIDING, FULL)
    block_keys: ClassVar = {"hf": _block_keys("lfm3"), "hf-file": _block_keys("lfm3-file")}
    layouts: ClassVar = {"hf": STATE_DICT, "hf-file": FILE}
    hf_class: ClassVar = "Lfm3ForCausalLM"
    hf_fields: ClassVar = {
        **{name: ours for name, ours in HF_FIELDS.items() if name not in ROTARY},
        f"{FULL}.rope_theta": "rope_theta",
        f"{FULL}.partial_rotary_factor": "rotary_fraction",
        f"{SLIDING}.rope_theta": "sliding_rope_theta",
        f"{SLIDING}.partial_rotary_factor": "sliding_rotary_fraction",
        "sliding_window": "window",
        "use_sandwich_norm": "sandwich_norm",
        "use_attention_gate": "head_gate",
        "attention_bias": "attention_bias",
    }
    hf_aliases: ClassVar = {"rms_norm_eps": "norm_eps"}
    hf_values: ClassVar = {
        "attention_dropout": (0,),
        "tie_word_embeddings": (True, False),
        **{f"{kind}.rope_type": ("default", "proportional") for kind in (FULL, SLIDING)},
        **{f"{kind}.factor": (1,) for kind in (FULL, SLIDING)},
    }
    hf_defaults: ClassVar = {"num_key_value_heads": 4, "head_dim": 128}

    block_types: tuple[str, ...] = ("conv", SLIDING, "conv", FULL)
    """The kinds of the blocks, from the lowest up. The pattern repeats."""
    kernel_size: int = 7
    """Number of taps of the short convolutions."""
    rotary_fraction: float = 0.5
    """The fraction of the pairs of a head's features that `ops.rotary` rotates in full attention,
    beginning with the fastest.
    """
    sliding_rope_theta: Positive = 1e4
    """θ of `ops.rotary` in the attention over a window."""
    sliding_rotary_fraction: float = 1.0
    """The fraction of the pairs that are rotated in the attention over a window."""
    sandwich_norm: bool = True
    """Whether norms also follow the mixers and the MLPs."""
    head_gate: bool = True
    """Whether the result of each head of the attention is multiplied by the sigmoid of a number."""
    attention_bias: bool = False
    """Whether the projections of the attention have biases."""

    def build(self, **options: Unpack[NormOptions]) -> "LFM3LanguageModel":
        return LFM3LanguageModel(self, **options)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a config.json, in which each kind of attention has rotary parameters of its own."""
        fields = dict(config)
        stated = fields.pop("rope_parameters", None) or ROTATION
        if not isinstance(stated, Mapping) or any(
            kind not in ROTATION or not isinstance(own, Mapping) for kind, own in stated.items()
        ):
            raise ValueError(
                f"config: rope_parameters: expected those of {' and of '.join(ROTATION)}, got "
                f"{stated!r}"
            )
        for kind, own in stated.items():
            fields |= {f"{kind}.{name}": value for name, value in _rotation(own).items()}
        return super().from_hf(fields)

    @classmethod
    def layer_types(cls, given: Mapping[str, Any]) -> Any:
        """The kind of each block, by default attention in every other block except the lowest."""
        kinds = {0: SLIDING, 2: FULL}
        numbers = range(given["num_hidden_layers"])
        default = [kinds.get(i % 4, "conv") if i else "conv" for i in numbers]
        return given.get("layer_types", default)

    def to_hf(self) -> dict[str, Any]:
        """Returns the config.json, with the rotary parameters of each kind of attention."""
        fields = super().to_hf()
        rotation = {
            kind: {name: fields.pop(f"{kind}.{name}") for name in ROTARY} for kind in ROTATION
        }
        types = {kind: {"rope_type": "proportional", **own} for kind, own in rotation.items()}
        return fields | {"rope_parameters": types}

    def block_of(self, *args: Any, **options: Any) -> HybridBlock:
        return super().block_of(*args, sandwich_norm=self.sandwich_norm, **options)

    def attention(self, rotary_fraction: float | None = None, **options: Any) -> SequenceLayer:
        fraction = self.rotary_fraction if rotary_fraction is None else rotary_fraction
        return super().attention(
            rotary_pairs=int(fraction * self.head_size // 2),
            head_gate=self.head_gate,
            use_bias=self.attention_bias,
            out_bias=self.attention_bias,
            **options,
        )

    def sliding_attention(self, **options: Any) -> SequenceLayer:
        rotary = {
            "rotary_fraction": self.sliding_rotary_fraction,
            "rope_theta": self.sliding_rope_theta,
        }
        return super().sliding_attention(**rotary, **options)


class LFM3LanguageModel(HybridLanguageModel):
    """Token embedding → blocks with a short convolution or attention → RMSNorm → head.

        >>> model = LFM3LanguageModelConfig(features=64).build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

        x ← x + norm(mixer(norm(x))),   x ← x + norm(mlp(norm(x)))

    The mixer is a `ShortConvolution`, an `Attention` over the last `window` steps, or one over all
    of them, in which only the fastest pairs of features are rotated. The queries and keys of each
    head are normed, and a gate multiplies each head. The MLP is a `GatedMLP` with silu. The head is
    the token embedding, or a matrix of its own.

    Args:
        config: the sizes. `LFM3LanguageModelConfig.from_hf` reads them from a config.json.
        **options: as for every layer. Matrices and convolutions are drawn from a normal
            distribution, and biases are zero, as in transformers.

    Layouts: `hf` (transformers' Lfm3ForCausalLM) and `hf-file` (the files that it saves, in which
    the gates have another key, and which lack `lm_head.weight` if the head is tied).

    """


@layouts_of(Attention, default=True)
def attention_layouts(attention: Attention) -> Layouts:
    """`lfm3` and `lfm3-file`: the keys of transformers' Lfm3Attention, and of its files."""
    if attention.qk_norm == "all":
        return {}
    keys = "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"
    return {
        layout.replace("hf", "lfm3"): attention.rows(*keys, gate) for layout, gate in GATES.items()
    }
