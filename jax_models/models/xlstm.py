"""xLSTM-7B: an mLSTM and a gated MLP in each block."""

__all__ = ["XLSTMLanguageModel", "XLSTMLanguageModelConfig"]

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Unpack

from flax import nnx

from jax_models.checks.values import Positive
from jax_models.layers.linear import Linear
from jax_models.layers.mlp import GatedMLP
from jax_models.layers.mlstm import MLSTM
from jax_models.layers.norm import RMSNorm
from jax_models.models.architecture import Checkpoint, Fields, Layout
from jax_models.models.hf import HFConfig
from jax_models.models.hybrid import BlockKeys, HybridBlock
from jax_models.models.language_model import LanguageModel
from jax_models.options import Initializer, LayerOptions, NormOptions

PARTS = ("mlstm_layer", "norm_mlstm", "norm_ffn")
KEYS = {
    "hf": BlockKeys(*PARTS, "xlstm", "ffn", ("proj_up_gate", "proj_up", "proj_down")),
    "fused": BlockKeys(
        *PARTS, "xlstm-fused", "ffn", ("proj_up_gate_z", "proj_up_gate_z", "proj_down")
    ),
}


def _sizes(checkpoint: Checkpoint) -> Fields:
    num_heads = checkpoint.size("*.mlstm_layer.igate_preact.bias", 0)
    return _with_sizes(checkpoint, num_heads, checkpoint.size("*.mlstm_layer.q.weight", 0))


def _fused_sizes(checkpoint: Checkpoint) -> Fields:
    num_heads = checkpoint.size("*.mlstm_layer.ifgate_preact.bias", 0) // 2
    both = checkpoint.size("*.mlstm_layer.qkv_opreact.weight", 0) // 2
    values = checkpoint.size("*.mlstm_layer.out_proj.weight", -1)
    return _with_sizes(checkpoint, num_heads, both - values)


def _with_sizes(checkpoint: Checkpoint, num_heads: int, keys: int) -> Fields:
    return {
        "num_heads": num_heads,
        "key_features": keys // num_heads,
        "value_features": checkpoint.size("*.mlstm_layer.out_proj.weight", -1) // num_heads,
        "mlp_features": checkpoint.size("*.ffn.proj_down.weight", -1),
    }


HF = Layout(
    "backbone.embeddings.weight",
    "backbone.blocks",
    "backbone.out_norm.weight",
    "lm_head.weight",
    blocks_layout="hf",
    sizes=_sizes,
)


def _factor(size: int, features: int) -> float:
    """A factor f with `int(f · features) == size`, as transformers computes the size."""
    # The product may be rounded to just below the size, and `int` then returns one less.
    factor = size / features
    return factor if int(features * factor) == size else math.nextafter(factor, math.inf)


@dataclasses.dataclass(frozen=True)
class XLSTMLanguageModelConfig(HFConfig):
    """The config of xLSTM. Except for the sizes, the defaults are those of transformers."""

    family: ClassVar = "xLSTM"
    model_types: ClassVar = ("xlstm",)
    marks: ClassVar = (".mlstm_layer.multihead_norm.",)
    layouts: ClassVar = {
        "hf": HF,
        "fused": HF._replace(blocks_layout="fused", sizes=_fused_sizes),
        "xlstm": HF._replace(embedding="embedding.weight"),
    }
    hf_class: ClassVar = "xLSTMForCausalLM"
    hf_fields: ClassVar = {
        "vocab_size": "vocab_size",
        "hidden_size": "features",
        "num_hidden_layers": "num_layers",
        "num_heads": "num_heads",
        "gate_soft_cap": "gate_soft_cap",
        "output_logit_soft_cap": "logits_soft_cap",
        "eps": "normalizer_epsilon",
        "norm_eps": "epsilon",
    }
    hf_aliases: ClassVar = {"embedding_dim": "hidden_size", "num_blocks": "num_hidden_layers"}
    hf_sizes: ClassVar = ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads")
    hf_values: ClassVar = {"use_bias": (False,), "add_out_norm": (True,)}
    presets: ClassVar = {"xlstm": {}}

    num_heads: int = 4
    """Number of heads of each mLSTM."""
    key_features: int = 24
    """Size of a head of the queries and keys."""
    value_features: int = 48
    """Size of a head of the values."""
    mlp_features: int = 512
    """Width of the gated MLPs."""
    gate_soft_cap: Positive = 15.0
    """The bound of the input and forget gates, before their exponential and sigmoid."""
    logits_soft_cap: Positive = 30.0
    """The bound of the logits."""
    normalizer_epsilon: Positive = 1e-6
    """ε of the mLSTMs, which they add to what they divide by."""
    epsilon: Positive = 1e-6
    """ε of the norms."""

    @classmethod
    def converted(cls, given: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """Computes the sizes of heads and MLPs, which the file states as parts of the width."""
        features, num_heads = given["hidden_size"], given["num_heads"]
        sizes = {}
        for name, factor, default in (("key", "qk", 0.5), ("value", "v", 1.0)):
            size = int(features * given.get(f"{factor}_dim_factor", default))
            if size % num_heads:
                raise ValueError(
                    f"config: {factor}_dim_factor: expected a multiple of num_heads = {num_heads} "
                    f"for hidden_size times this factor, got {size}"
                )
            sizes[f"{name}_features"] = size // num_heads
        width, multiple = (
            features * given.get("ffn_proj_factor", 2.667),
            given.get("ffn_round_up_to_multiple_of", 64),
        )
        return {**sizes, "mlp_features": int((width + multiple - 1) // multiple * multiple)}

    def to_hf(self) -> dict[str, Any]:
        """Returns the config.json, whose factors of the width give the sizes."""
        fields = super().to_hf()
        del fields["rope_parameters"]
        return fields | {
            "qk_dim_factor": _factor(self.num_heads * self.key_features, self.features),
            "v_dim_factor": _factor(self.num_heads * self.value_features, self.features),
            "ffn_proj_factor": _factor(self.mlp_features, self.features),
            "ffn_round_up_to_multiple_of": 1,
        }

    @property
    def small_init(self) -> Initializer:
        """The initializer of all matrices but those in the following method, and of gates."""
        return nnx.initializers.normal(math.sqrt(2 / (5 * self.features)))

    def out_init(self, inputs: int) -> Initializer:
        """The initializer of the matrices whose products are added to the residual stream."""
        return nnx.initializers.normal(2 / self.num_layers / math.sqrt(inputs))

    def block(self, **options: Unpack[LayerOptions]) -> HybridBlock:
        """Builds a block."""
        inits: Any = {"in_init": self.small_init, "out_init": self.out_init(self.features)}
        mlp = partial(
            GatedMLP,
            self.features,
            self.mlp_features,
            activation="silu",
            gate_init=nnx.initializers.zeros,
            down_init=self.out_init(self.mlp_features),
            kernel_init=self.small_init,
        )
        norm = partial(RMSNorm, epsilon=self.epsilon)
        return HybridBlock(self.make(MLSTM, **inits, **options), mlp, norm, keys=KEYS, **options)

    def build(self, **options: Unpack[NormOptions]) -> "XLSTMLanguageModel":
        return XLSTMLanguageModel(self, **options)


class XLSTMLanguageModel(LanguageModel):
    """Token embedding → blocks with an `MLSTM` and a gated MLP each → RMSNorm → Linear.

        >>> model = XLSTMLanguageModelConfig(features=64).build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

        x ← x + mlstm(norm(x)),   x ← x + mlp(norm(x))
        logits = c tanh(norm(x) W / c)

    The MLP is a `GatedMLP` with silu, and c is `logits_soft_cap`.

    Args:
        config: the sizes. `XLSTMLanguageModelConfig.from_hf` reads them from a config.json.
        **options: as for every layer. Parameters start as in transformers: matrices with normal
            random numbers, but those of all gates with zeros.

    Layouts: `hf` (transformers' xLSTMForCausalLM, and the published file), `fused` (the same with
    `weight_mode` "fused", of which transformers 5.24 cannot build a model) and `xlstm` (NX-AI's
    xLSTMLarge).

    Source: Beck et al. 2025 (xLSTM 7B, arXiv 2503.13427); transformers' xLSTMForCausalLM.

    """

    config: XLSTMLanguageModelConfig

    def __init__(self, config: XLSTMLanguageModelConfig, **options: Unpack[NormOptions]):
        sizes, init = (config.vocab_size, config.features), config.small_init
        super().__init__(
            config,
            embedding=nnx.Embed(*sizes, embedding_init=init, **options),
            blocks=[config.block(**options) for _ in range(config.num_layers)],
            norm=RMSNorm(config.features, epsilon=config.epsilon, **options),
            head=Linear(*sizes[::-1], use_bias=False, kernel_init=init, **options),
            logits_soft_cap=config.logits_soft_cap,
        )
