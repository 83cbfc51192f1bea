"""The Griffin language model of RecurrentGemma (arXiv 2402.19427 and 2404.07839)."""

__all__ = ["GriffinLanguageModel", "GriffinLanguageModelConfig"]

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Unpack, get_args

import ml_dtypes
from flax import nnx

from jax_models.layers.activation import Gelu
from jax_models.layers.griffin import GriffinBlock, GriffinMixing
from jax_models.layers.norm import ZeroCenteredRMSNorm
from jax_models.models.architecture import Checkpoint, Fields, Layout
from jax_models.models.hf import PatternConfig, kinds_by_key
from jax_models.models.language_model import LanguageModel
from jax_models.options import NormOptions

HF_ACTIVATIONS: dict[str, Gelu] = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
"""The activations' names in transformers and in this package, transformers' default first."""


def _sizes(
    checkpoint: Checkpoint,
    *,
    mlp: tuple[str, int],
    gate: str,
    conv: tuple[str, int],
    keys: tuple[str, int],
    query_bias: str,
    window: int,
) -> Fields:
    """Reads the fields from the weights with these keys, or from this axis of theirs."""
    fields = {
        "mlp_features": checkpoint.size(*mlp),
        "block_types": kinds_by_key(checkpoint, gate, "recurrent", "attention"),
        "attention_bias": checkpoint.has(query_bias),
        "window": checkpoint.given("window", window),
    }
    if checkpoint.has(gate):  # which has one block per head
        num_heads = checkpoint.size(gate, 0, rank=3)
        fields["recurrent_features"] = checkpoint.size(gate, 1, rank=3) * num_heads
        fields["kernel_size"] = checkpoint.size(*conv)
    else:  # assume that all heads share one head of keys and values
        num_heads = checkpoint.given("num_heads", checkpoint.features // checkpoint.size(*keys))
    if checkpoint.has(keys[0]):
        fields["num_kv_heads"] = checkpoint.size(*keys) * num_heads // checkpoint.features
    return fields | {"num_heads": num_heads}


HF = Layout(
    "model.embed_tokens.weight",
    "model.layers",
    "model.final_norm.weight",
    "lm_head.weight",
    blocks_layout="hf",
    sizes=partial(
        _sizes,
        mlp=("*.mlp_block.gate_proj.weight", 0),
        gate="*.temporal_block.rg_lru.input_gate_weight",
        conv=("*.temporal_block.conv_1d.weight", 2),
        keys=("*.temporal_block.k_proj.weight", 0),
        query_bias="*.temporal_block.q_proj.bias",
        window=2048,
    ),
)


def _deepmind(keys: tuple[str, int]) -> Layout:
    """The layout of recurrentgemma, whose window of 2048 does not count the current step."""
    sizes = partial(
        _sizes,
        mlp=("*.mlp_block.ffw_up.w", 2),
        gate="*.recurrent_block.rg_lru.input_gate.w",
        conv=("*.recurrent_block.conv_1d.w", 0),
        keys=keys,
        query_bias="*.attention_block.proj_q.bias",
        window=2049,
    )
    return Layout("embedder.input_embedding", "blocks", "final_norm.scale", sizes=sizes)


@dataclasses.dataclass(frozen=True)
class GriffinLanguageModelConfig(PatternConfig):
    """The config of Griffin. Except for the sizes, the defaults are those of RecurrentGemma."""

    family: ClassVar = "RecurrentGemma"
    model_types: ClassVar = ("recurrent_gemma",)
    marks: ClassVar = ("rg_lru",)
    kinds: ClassVar = get_args(GriffinMixing)
    hf_class: ClassVar = "RecurrentGemmaForCausalLM"
    hf_fields: ClassVar = {
        "vocab_size": "vocab_size",
        "hidden_size": "features",
        "num_hidden_layers": "num_layers",
        "lru_width": "recurrent_features",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "attention_window_size": "window",
        "conv1d_width": "kernel_size",
        "block_types": "block_types",
        "rope_theta": "rope_theta",
        "partial_rotary_factor": "rotary_fraction",
        "attention_bias": "attention_bias",
        "rms_norm_eps": "epsilon",
        "logits_soft_cap": "logits_soft_cap",
    }
    hf_values: ClassVar = {
        "tie_word_embeddings": (True,),
        "hidden_activation": tuple(HF_ACTIVATIONS),
        "attention_dropout": (0,),
        "rope_type": ("default",),
    }
    hf_defaults: ClassVar = {"attention_window_size": 2048}
    layouts: ClassVar = {
        "hf": HF,
        "hf-file": HF._replace(repeats_embedding=False),
        "deepmind": _deepmind(("*.attention_block.proj_k.kernel", 1)),
        "deepmind-torch": _deepmind(("*.attention_block.proj_k.weight", 0)),
    }
    presets: ClassVar = {"griffin": {}}

    mlp_features: int = 576
    """Width of the gated MLPs; three times `features` in the paper."""
    recurrent_features: int = 192
    """Width of the recurrences."""
    num_heads: int = 4
    """Number of heads of the attention, and of blocks of the recurrences' gates."""
    num_kv_heads: int = 1
    """Number of heads of the keys and values."""
    window: int = 64
    """Number of steps that the attention sees from each step, including the step itself. This is
    transformers' attention_window_size, and recurrentgemma's attention_window_size plus one.
    """
    kernel_size: int = 4
    """Number of taps of the causal convolution."""
    block_types: tuple[GriffinMixing, ...] = ("recurrent", "recurrent", "attention")
    """The kinds of the blocks, from the lowest up. The pattern repeats."""
    rotary_fraction: float = 0.5
    """The fraction of each head that rotary positions rotate."""
    rope_theta: float = 10_000.0
    """θ. At position p, the i-th of n pairs is rotated by p · θ^{−i/n}."""
    attention_bias: bool = False
    """Whether queries, keys and values have biases."""
    activation: Gelu = "gelu_tanh"
    """The version of gelu in gates and MLPs."""
    epsilon: float = 1e-6
    """ε of the norms."""
    scale_embeddings: bool = True
    """Whether embeddings are multiplied by √features, rounded to bfloat16."""
    logits_soft_cap: float = 30.0
    """Logits are cap · tanh(logits / cap). 0: no cap."""

    def __post_init__(self):
        super().__post_init__()
        if self.logits_soft_cap < 0:
            raise ValueError(f"logits_soft_cap: expected at least 0, got {self.logits_soft_cap}")

    def build(self, **options: Unpack[NormOptions]) -> "GriffinLanguageModel":
        return GriffinLanguageModel(self, **options)

    @classmethod
    def converted(cls, given: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """Fills in the widths and numbers of heads that a config.json may leave out."""
        return {
            "recurrent_features": given.get("lru_width") or given["hidden_size"],
            "num_kv_heads": given.get("num_key_value_heads") or given["num_attention_heads"],
            "mlp_features": given["intermediate_size"] // 2,
            "activation": HF_ACTIVATIONS[given["hidden_activation"]],
        }

    def to_hf(self) -> dict[str, Any]:
        """Returns the config.json for transformers, which requires scaled embeddings."""
        if not self.scale_embeddings:
            raise ValueError(
                "scale_embeddings: expected True, because transformers' RecurrentGemma always "
                "scales its embeddings, got False"
            )
        names = {ours: name for name, ours in HF_ACTIVATIONS.items()}
        return {
            **super().to_hf(),
            "intermediate_size": 2 * self.mlp_features,
            "hidden_activation": names[self.activation],
            "tie_word_embeddings": True,
        }


class GriffinLanguageModel(LanguageModel):
    """Token embedding → Griffin blocks → RMSNorm → the token embedding again.

        >>> config = GriffinLanguageModelConfig(features=64, recurrent_features=64, mlp_features=96)
        >>> model = config.build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

        logits = cap · tanh(norm(blocks(√features · E[tokens])) Eᵀ / cap)

    The size of the state is bounded: a block carries the state of its recurrence, or the keys and
    values of a window. Documents that are packed into a row (`reset`) do not see each other, and
    the positions of each begin at 0.

    Args:
        config: the sizes. `GriffinLanguageModelConfig.from_hf` reads them from a config.json, and
            `from_state_dict` reads them from a checkpoint.
        **options: as for every layer. Parameters are initialized as in recurrentgemma.

    Layouts: `hf` (transformers' RecurrentGemmaForCausalLM, whose `lm_head.weight` is the
    embedding), `hf-file` (the same without that key, as in transformers' files). With a single head
    of keys and values and no `attention_bias`: `deepmind` (the parameters of recurrentgemma's
    Griffin in Flax, with paths joined by dots) and `deepmind-torch` (its PyTorch checkpoints).

    """

    def __init__(self, config: GriffinLanguageModelConfig, **options: Unpack[NormOptions]):
        init = nnx.initializers.normal(config.features**-0.5)
        scale = float(ml_dtypes.bfloat16(config.features**0.5)) if config.scale_embeddings else 1.0
        super().__init__(
            config,
            embedding=nnx.Embed(config.vocab_size, config.features, embedding_init=init, **options),
            embedding_scale=scale,
            blocks=[
                config.make(
                    GriffinBlock, mixing=mixing, out_variance=2 / config.num_layers, **options
                )
                for mixing in config.mixings
            ],
            norm=ZeroCenteredRMSNorm(config.features, epsilon=config.epsilon, **options),
            logits_soft_cap=config.logits_soft_cap,
        )
