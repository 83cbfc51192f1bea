"""The Griffin language model of RecurrentGemma (arXiv 2402.19427 and 2404.07839)."""

__all__ = ["GriffinLanguageModel", "GriffinLanguageModelConfig"]

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, Unpack, get_args

import ml_dtypes
from flax import nnx

from jax_models.layers.activation import Gelu
from jax_models.layers.griffin import GriffinBlock, GriffinMixing
from jax_models.layers.norm import ZeroCenteredRMSNorm
from jax_models.models.architecture import Checkpoint, Fields, Layout, Size, has, whole_key
from jax_models.models.language_model import LanguageModel, Preset, StackConfig
from jax_models.options import NormOptions

HF_ACTIVATIONS: dict[str, Gelu] = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
"""The activations' names in transformers and in this package, transformers' default first."""
HF_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "features",
    "num_hidden_layers": "num_layers",
    "lru_width": "recurrent_features",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "attention_window_size": "window",
    "conv1d_width": "kernel_size",
    "rope_theta": "rope_theta",
    "partial_rotary_factor": "rotary_fraction",
    "attention_bias": "attention_bias",
    "rms_norm_eps": "epsilon",
    "logits_soft_cap": "logits_soft_cap",
}
"""The fields of transformers' config.json, and the fields of our config with the same value."""
HF_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
)
"""The fields that a config.json must have."""
HF_VALUES: dict[str, Any] = {
    "model_type": ("recurrent_gemma",),
    "tie_word_embeddings": (True,),
    "hidden_activation": tuple(HF_ACTIVATIONS),
    "attention_dropout": (0,),
    "rope_type": ("default",),
}
"""The values that these fields of a config.json can have, the default first."""
HF_DEFAULTS = {name: value for name, (value, *_) in HF_VALUES.items() if name != "model_type"}
HF_DEFAULTS |= {"attention_window_size": 2048}
"""transformers' defaults for these fields. Its other defaults equal ours."""


def _heads_of_keys(size: int, fields: Fields) -> int:
    """The number of heads, if all of them share one head of keys and values."""
    return fields["features"] // size


def _kv_heads(size: int, fields: Fields) -> int:
    return size * fields["num_heads"] // fields["features"]


def _all_blocks(size: int, fields: Fields) -> int:
    """The width of a recurrence, from the size of a gate's block. There is one block per head."""
    return size * fields["num_heads"]


def _block_types(gate: str) -> Callable[[Checkpoint, Fields], tuple[GriffinMixing, ...]]:
    """Finds the shortest repeating pattern of block kinds. Only recurrent blocks have this gate."""

    def pattern(checkpoint: Checkpoint, fields: Fields) -> tuple[GriffinMixing, ...]:
        layout, weights = checkpoint.layout, checkpoint.weights
        kinds: list[GriffinMixing] = [
            "recurrent" if whole_key(layout, gate, number) in weights else "attention"
            for number in checkpoint.numbers
        ]
        lengths = (n for n in range(1, len(kinds)) if kinds[n:] == kinds[:-n])
        return tuple(kinds[: next(lengths, len(kinds))])

    return pattern


def _sizes(
    *, mlp: Size, gate: str, conv: Size, keys: Size, query_bias: str, window: int
) -> dict[str, Any]:
    """The `sizes` of a layout. No shape determines the window, so it is an argument."""
    return {
        "mlp_features": mlp,
        "block_types": _block_types(gate),
        "num_heads": (Size(gate, 0, rank=3), keys._replace(convert=_heads_of_keys)),
        "recurrent_features": (Size(gate, 1, rank=3, convert=_all_blocks), ...),
        "kernel_size": (conv, ...),
        "num_kv_heads": (keys._replace(convert=_kv_heads), ...),
        "attention_bias": has(query_bias),
        "window": window,
    }


HF = Layout(
    "model.embed_tokens.weight",
    "model.layers",
    "model.final_norm.weight",
    "lm_head.weight",
    blocks_layout="hf",
    sizes=_sizes(
        mlp=Size("*.mlp_block.gate_proj.weight", 0),
        gate="*.temporal_block.rg_lru.input_gate_weight",
        conv=Size("*.temporal_block.conv_1d.weight", 2, rank=3),
        keys=Size("*.temporal_block.k_proj.weight", 0),
        query_bias="*.temporal_block.q_proj.bias",
        window=2048,
    ),
)


def _deepmind(keys: Size) -> Layout:
    """The layout of recurrentgemma, whose window of 2048 does not count the current step."""
    sizes = _sizes(
        mlp=Size("*.mlp_block.ffw_up.w", 2, rank=3),
        gate="*.recurrent_block.rg_lru.input_gate.w",
        conv=Size("*.recurrent_block.conv_1d.w", 0),
        keys=keys,
        query_bias="*.attention_block.proj_q.bias",
        window=2049,
    )
    return Layout("embedder.input_embedding", "blocks", "final_norm.scale", sizes=sizes)


@dataclasses.dataclass(frozen=True)
class GriffinLanguageModelConfig(StackConfig):
    """The config of Griffin. Except for the sizes, the defaults are those of RecurrentGemma."""

    family: ClassVar = "RecurrentGemma"
    model_types: ClassVar = ("recurrent_gemma",)
    marks: ClassVar = ("rg_lru",)
    layouts: ClassVar = {
        "hf": HF,
        "hf-file": HF._replace(repeats_embedding=False),
        "deepmind": _deepmind(Size("*.attention_block.proj_k.kernel", 1)),
        "deepmind-torch": _deepmind(Size("*.attention_block.proj_k.weight", 0)),
    }

    vocab_size: int = 256
    """Number of distinct tokens."""
    features: int = 192
    """Width of the model."""
    num_layers: int = 3
    """Number of residual blocks."""
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
        kinds = get_args(GriffinMixing)
        types = tuple(self.block_types) if isinstance(self.block_types, list | tuple) else ()
        if not types or not all(kind in kinds for kind in types):
            raise ValueError(f"block_types: expected some of {kinds}, got {self.block_types!r}")
        object.__setattr__(self, "block_types", types)
        if self.logits_soft_cap < 0:
            raise ValueError(f"logits_soft_cap: expected at least 0, got {self.logits_soft_cap}")

    @property
    def mixings(self) -> list[GriffinMixing]:
        """The kind of each block, from the lowest up."""
        kinds = self.block_types
        return [kinds[i % len(kinds)] for i in range(self.num_layers)]

    @classmethod
    def presets(cls) -> dict[str, Preset]:
        return {"griffin": Preset(cls())}

    def build(self, **options: Unpack[NormOptions]) -> "GriffinLanguageModel":
        return GriffinLanguageModel(self, **options)

    @classmethod
    def from_checkpoint(
        cls, weights: Mapping[str, Any], fields: Mapping[str, Any] | None, **options: Any
    ) -> Self:
        """Prefers the config.json, because weights do not determine the window and activation."""
        if fields is None:
            return cls.from_state_dict(weights, **options)
        return dataclasses.replace(cls.from_hf(fields), **options)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads the config from the config.json of transformers' RecurrentGemma.

        Raises:
            ValueError: the config.json is of another model, has an option that this model does not
                support, or lacks a size.

        """
        stated = {name: value for name, value in config.items() if value is not None}
        given: dict[str, Any] = {**HF_DEFAULTS, **stated, **stated.get("rope_parameters", {})}
        for name, values in HF_VALUES.items():
            if (value := given.get(name)) not in values:
                known = " or ".join(map(str, values))
                raise ValueError(f"config: {name}: expected {known}, got {value}")
        for name in HF_SIZES:
            if not isinstance(value := stated.get(name), int):
                raise ValueError(f"config: {name}: expected an integer, got {value!r}")
        # The config.json may leave out the width of the recurrences and the number of key heads.
        given["lru_width"] = given.get("lru_width") or given["hidden_size"]
        heads = given.get("num_key_value_heads") or given["num_attention_heads"]
        given["num_key_value_heads"] = heads
        return cls(
            mlp_features=given["intermediate_size"] // 2,
            block_types=tuple(given.get("block_types") or cls.block_types),
            activation=HF_ACTIVATIONS[given["hidden_activation"]],
            **{ours: given[name] for name, ours in HF_FIELDS.items() if name in given},
        )

    def to_hf(self) -> dict[str, Any]:
        """Returns the config.json with which transformers' RecurrentGemma is the same model.

        Raises:
            ValueError: transformers does not support an option of this config.

        """
        if not self.scale_embeddings:
            raise ValueError(
                "scale_embeddings: expected True, because transformers' RecurrentGemma always "
                "scales its embeddings, got False"
            )
        fields = {name: getattr(self, ours) for name, ours in HF_FIELDS.items()}
        rotary = {name: fields[name] for name in ("rope_theta", "partial_rotary_factor")}
        names = {ours: name for name, ours in HF_ACTIVATIONS.items()}
        return {
            "architectures": ["RecurrentGemmaForCausalLM"],
            "model_type": "recurrent_gemma",
            **fields,
            "intermediate_size": 2 * self.mlp_features,
            "block_types": [*self.block_types],
            "rope_parameters": {"rope_type": "default", **rotary},
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
