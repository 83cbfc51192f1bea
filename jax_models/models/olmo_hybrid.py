"""OLMo Hybrid: Gated DeltaNet with negative eigenvalues, and post-normed attention."""

__all__ = ["OLMoHybridLanguageModel", "OLMoHybridLanguageModelConfig"]

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Unpack

from jax_models.layers.attention import Attention
from jax_models.layers.conv import in_thirds
from jax_models.layers.gated_delta_net import GatedDeltaNet, bias_of_log_uniform, log_of_uniform
from jax_models.models.architecture import Checkpoint, Fields
from jax_models.models.hf import kinds_by_key
from jax_models.models.hybrid import (
    FULL,
    LINEAR,
    BlockKeys,
    GatedDeltaNetConfig,
    HybridLanguageModel,
    attention_sizes,
    model_layouts,
)
from jax_models.options import NormOptions
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, layouts_of, linear, nested, rms_norm, same

INPUT, ATTENTION, MLP = (
    "input_layernorm",
    "post_attention_layernorm",
    "post_feedforward_layernorm",
)


def _sizes(conv: str, checkpoint: Checkpoint) -> Fields:
    fields = {
        "mlp_features": checkpoint.size("*.mlp.gate_proj.weight", 0),
        "block_types": kinds_by_key(checkpoint, "*.linear_attn.A_log", LINEAR, FULL),
        **attention_sizes(checkpoint, "self_attn"),
        "attention_bias": checkpoint.has("*.self_attn.q_proj.bias"),
        "tied_head": checkpoint.tied_head,
    }
    num_key_heads = checkpoint.given("num_key_heads")
    if not checkpoint.has("*.linear_attn.A_log"):
        return fields
    return fields | {
        "num_value_heads": checkpoint.size("*.linear_attn.A_log", 0, rank=1),
        "value_features": checkpoint.size("*.linear_attn.o_norm.weight", 0, rank=1),
        "key_features": checkpoint.size("*.linear_attn.q_proj.weight", 0, rank=2) // num_key_heads,
        "kernel_size": checkpoint.size(f"*.linear_attn.{conv}.weight", 2, rank=3),
    }


SIZES, FILE_SIZES = partial(_sizes, "conv1d"), partial(_sizes, "q_conv1d")
STATE_DICT, FILE = model_layouts("model", "norm", SIZES, FILE_SIZES)


@dataclasses.dataclass(frozen=True)
class OLMoHybridLanguageModelConfig(GatedDeltaNetConfig):
    """The config of OLMo Hybrid. Except for the sizes, the defaults are those of transformers."""

    family: ClassVar = "OLMo Hybrid"
    model_types: ClassVar = ("olmo_hybrid",)
    marks: ClassVar = (".linear_attn.g_proj.",)
    left_out: ClassVar = ("mtp.",)
    post_normed: ClassVar = (FULL,)
    block_keys: ClassVar = {
        "hf": {
            LINEAR: BlockKeys("linear_attn", INPUT, ATTENTION, "olmo_hybrid"),
            FULL: BlockKeys("self_attn", ATTENTION, MLP, "olmo_hybrid"),
        },
        "hf-file": {
            LINEAR: BlockKeys(
                "linear_attn",
                "attention_layer_norm",
                "feedforward_layer_norm",
                "olmo_hybrid-file",
            ),
            FULL: BlockKeys("self_attn", "feedforward_layer_norm", MLP, "olmo_hybrid"),
        },
    }
    layouts: ClassVar = {"hf": STATE_DICT, "hf-file": FILE}
    hf_class: ClassVar = "OlmoHybridForCausalLM"
    hf_fields: ClassVar = GatedDeltaNetConfig.hf_fields | {
        "linear_allow_neg_eigval": "negative_eigenvalues"
    }
    presets: ClassVar = {"olmo-hybrid": {"num_steps": 1000}}

    negative_eigenvalues: bool = True
    """Whether a step of a Gated DeltaNet can flip the sign of what its state stores."""

    def build(self, **options: Unpack[NormOptions]) -> "OLMoHybridLanguageModel":
        return OLMoHybridLanguageModel(self, **options)

    @classmethod
    def converted(cls, given: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """Fills in sizes that depend on others, and keeps a θ of null, which means no rotation."""
        heads, features = given["num_attention_heads"], given["hidden_size"]
        key_heads = given.get("linear_num_key_heads", heads)
        key_features = given.get("linear_key_head_dim", int(0.75 * features / key_heads))
        rotary = config.get("rope_scaling") or config.get("rope_parameters") or {}
        return super().converted(given, config) | {
            "num_key_heads": key_heads,
            "num_value_heads": given.get("linear_num_value_heads", heads),
            "key_features": key_features,
            "value_features": given.get("linear_value_head_dim", 2 * key_features),
            "rope_theta": rotary.get("rope_theta", config.get("rope_theta", cls.rope_theta)),
        }

    @classmethod
    def layer_types(cls, given: Mapping[str, Any]) -> Any:
        """Returns the kind of each block.

        By default, every fourth block has attention. A model of fewer blocks has
        attention in its last block.
        """
        types = super().layer_types({**given, "full_attention_interval": 4})
        if "layer_types" not in given and FULL not in types:
            types[-1] = FULL
        return types

    def to_hf(self) -> dict[str, Any]:
        """Returns the config for transformers.

        Raises:
            ValueError: all blocks are of one kind, which transformers does not support.

        """
        if {*self.mixings} != {*self.kinds}:
            raise ValueError(
                f"block_types: expected blocks of both kinds, as transformers needs, got "
                f"{self.mixings}"
            )
        return super().to_hf()

    def attention(self, **options: Any) -> SequenceLayer:
        rotary = {"rotary_features": 0} if self.rope_theta is None else {}
        return super().attention(qk_norm="all", **rotary, **options)

    def mixer(self, **options: Any) -> SequenceLayer:
        """Builds the Gated DeltaNet of a block.

        As in transformers, the ε of its norm is 1e-5, whatever the config's `epsilon` is.
        """
        return super().mixer(
            epsilon=1e-5,
            decay_init=log_of_uniform(0.0, 16.0),
            dt_init=bias_of_log_uniform(1e-3, 0.1, 1e-4),
            **options,
        )


class OLMoHybridLanguageModel(HybridLanguageModel):
    """Token embedding → blocks with Gated DeltaNet or attention → RMSNorm → head.

        >>> model = OLMoHybridLanguageModelConfig(features=64).build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

        x ← x + gated_delta_net(norm(x)),   x ← x + mlp(norm(x))
        x ← x + norm(attention(x)),         x ← x + norm(mlp(x))

    Every fourth block has attention and is post-normed. The queries and keys of all heads of the
    `Attention` are normed together. The MLP is a `GatedMLP` with silu.

    Args:
        config: the sizes. `OLMoHybridLanguageModelConfig.from_hf` reads them from a config.json.
        **options: as for every layer. Matrices and convolutions are drawn from a normal
            distribution, and decays as transformers does by default.

    Layouts: `hf` (the `state_dict` of transformers' OlmoHybridForCausalLM), `hf-file` (its files,
    which have other keys, and no `lm_head.weight` if the head is tied).

    """


@layouts_of(GatedDeltaNet)
def delta_net_layouts(layer: GatedDeltaNet) -> Layouts:
    """`olmo_hybrid`, and `olmo_hybrid-file`, the keys of its files with three convolutions."""
    names = {f"{name}_proj": f"{name}_proj" for name in "qkvba"}
    names |= {"z_proj": "g_proj", "out_proj": "o_proj"}
    rows = [
        *(same(name, name) for name in ("A_log", "dt_bias")),
        *rms_norm("norm", "o_norm"),
        *(row for name, key in names.items() for row in linear(name, key, bias=False)),
    ]
    convs = [f"{name}_conv1d.weight" for name in "qkv"]
    return {
        "olmo_hybrid": [*rows, *nested(layer.conv.torch_rows(), "conv", "conv1d")],
        "olmo_hybrid-file": [*rows, in_thirds("conv.kernel", convs)],
    }


@layouts_of(Attention, default=True)
def attention_layouts(attention: Attention) -> Layouts:
    """`olmo_hybrid`: the keys of OlmoHybridAttention, with a norm over all heads."""
    if attention.qk_norm != "all":
        return {}
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    return {"olmo_hybrid": attention.rows(*projections, "q_norm", "k_norm")}
