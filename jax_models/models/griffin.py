"""The Griffin language model, as RecurrentGemma (arXiv 2402.19427 and 2404.07839)."""

__all__ = ["GriffinLanguageModel", "GriffinLanguageModelConfig"]

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, Unpack, get_args

import ml_dtypes
from flax import nnx

from jax_models.layers.activation import Gelu
from jax_models.layers.griffin import GriffinBlock, GriffinMixing
from jax_models.layers.norm import ZeroCenteredRMSNorm
from jax_models.models.architecture import Checkpoint, Fields, Layout, Size, has
from jax_models.models.language_model import LanguageModel, Preset, StackConfig
from jax_models.options import NormOptions

HF_ACTIVATIONS: dict[str, Gelu] = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
"""What transformers calls them; its default first."""


def _heads_of_keys(size: int, fields: Fields) -> int:
    """The number of heads, if one head of keys and values serves all of them."""
    return fields["features"] // max(size, 1)


def _kv_heads(size: int, fields: Fields) -> int:
    return size * fields["num_heads"] // fields["features"]


def _all_blocks(size: int, fields: Fields) -> int:
    """The width of a recurrence, from that of a gate's block. Each head has a block of its own."""
    return size * fields["num_heads"]


def _block_types(gate: str) -> Callable[[Checkpoint, Fields], tuple[GriffinMixing, ...]]:
    """Finds the shortest repeating pattern of kinds of blocks. Recurrent blocks have this gate."""

    def pattern(checkpoint: Checkpoint, fields: Fields) -> tuple[GriffinMixing, ...]:
        kinds: list[GriffinMixing] = [
            "recurrent" if checkpoint.find(f"{number}.{gate}") else "attention"
            for number in checkpoint.numbers
        ]
        lengths = (n for n in range(1, len(kinds)) if kinds[n:] == kinds[:-n])
        return tuple(kinds[: next(lengths, len(kinds))])

    return pattern


def _sizes(
    *, mlp: Size, gate: str, conv: Size, keys: Size, query_bias: str, window: int
) -> dict[str, Any]:
    """How to read the fields in a layout. No shape determines the window, so it is given."""
    return {
        "mlp_features": mlp,
        "block_types": _block_types(gate.removeprefix("*.")),
        "num_heads": (Size(gate, 0, rank=3), keys._replace(convert=_heads_of_keys)),
        "recurrent_features": (Size(gate, 1, rank=3, convert=_all_blocks), 192),
        "kernel_size": (conv, 4),
        "num_kv_heads": (keys._replace(convert=_kv_heads), 1),
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
    """The window of recurrentgemma, 2048, does not count the current step; `window` does."""
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
    """The Griffin language model. Except for the sizes, the defaults are RecurrentGemma's."""

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
    """Residual blocks."""
    mlp_features: int = 576
    """Width of the gated MLPs; three times `features` in the paper."""
    recurrent_features: int = 192
    """Width of the recurrences."""
    num_heads: int = 4
    """Heads of the attention, and blocks of the recurrences' gates."""
    num_kv_heads: int = 1
    """Heads of the keys and values."""
    window: int = 64
    """Steps that a step of the attention sees, including itself: what transformers calls
    attention_window_size, and one more than what recurrentgemma calls so."""
    kernel_size: int = 4
    """Inputs that the causal convolution sees."""
    block_types: tuple[GriffinMixing, ...] = ("recurrent", "recurrent", "attention")
    """The kinds of the blocks, from the lowest up; the pattern repeats."""
    rotary_fraction: float = 0.5
    """The fraction of each head that rotary positions rotate."""
    rope_theta: float = 10_000.0
    """θ. At position p, the i-th of n pairs is rotated by p · θ^{−i/n}."""
    attention_bias: bool = False
    """Queries, keys and values have biases."""
    activation: Gelu = "gelu_tanh"
    """The gelu of gates and MLPs."""
    epsilon: float = 1e-6
    """ε of the norms."""
    scale_embeddings: bool = True
    """Embeddings are multiplied by √features, rounded to bfloat16."""
    logits_soft_cap: float = 30.0
    """Logits are cap · tanh(logits / cap). 0: no cap."""

    def __post_init__(self):
        """Refuse what the annotations do not allow, and blocks that there are not."""
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
        """What each block mixes the steps by."""
        kinds = self.block_types
        return [kinds[i % len(kinds)] for i in range(self.num_layers)]

    @classmethod
    def presets(cls) -> dict[str, Preset]:
        """`griffin`."""
        return {"griffin": Preset(cls())}

    def build(self, **options: Unpack[NormOptions]) -> "GriffinLanguageModel":
        """The model of this config."""
        return GriffinLanguageModel(self, **options)

    @classmethod
    def from_checkpoint(
        cls, weights: Mapping[str, Any], fields: Mapping[str, Any] | None, **options: Any
    ) -> Self:
        """The window and the activation are in the config.json alone."""
        if fields is None:
            return cls.from_state_dict(weights, **options)
        return dataclasses.replace(cls.from_hf(fields), **options)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """The config in the config.json of a RecurrentGemma of transformers.

        Raises:
            ValueError: it is of another model, or of an option that this one does not have, or a
                size is missing.

        """
        expected = {
            "model_type": ("recurrent_gemma",),
            "tie_word_embeddings": (True,),
            "hidden_activation": tuple(HF_ACTIVATIONS),
            "attention_dropout": (0,),
        }
        defaults = {"model_type": None}
        for name, values in expected.items():
            if (value := config.get(name, defaults.get(name, values[0]))) not in values:
                known = " or ".join(map(str, values))
                raise ValueError(f"config: {name}: expected {known}, got {value}")
        rope = {**config, **(config.get("rope_parameters") or {})}
        if (kind := rope.get("rope_type", "default")) != "default":
            raise ValueError(f"config: rope_type: expected default, got {kind}")

        def size(name: str) -> int:
            if not isinstance(value := config.get(name), int):
                raise ValueError(f"config: {name}: expected an integer, got {value!r}")
            return value

        return cls(
            vocab_size=size("vocab_size"),
            features=size("hidden_size"),
            num_layers=size("num_hidden_layers"),
            mlp_features=size("intermediate_size") // 2,
            recurrent_features=config.get("lru_width") or size("hidden_size"),
            num_heads=size("num_attention_heads"),
            num_kv_heads=config.get("num_key_value_heads") or size("num_attention_heads"),
            window=config.get("attention_window_size", 2048),
            kernel_size=config.get("conv1d_width", 4),
            block_types=tuple(config.get("block_types") or cls.block_types),
            rotary_fraction=float(rope.get("partial_rotary_factor", 0.5)),
            rope_theta=float(rope.get("rope_theta", 10_000.0)),
            attention_bias=config.get("attention_bias", False),
            activation=HF_ACTIVATIONS[config.get("hidden_activation", "gelu_pytorch_tanh")],
            epsilon=config.get("rms_norm_eps", 1e-6),
            logits_soft_cap=float(config.get("logits_soft_cap", 30.0)),
        )

    def to_hf(self) -> dict[str, Any]:
        """The config.json of this model as a RecurrentGemma of transformers.

        Raises:
            ValueError: transformers has no such option.

        """
        if not self.scale_embeddings:
            raise ValueError(
                "scale_embeddings: expected True, because transformers' RecurrentGemma always "
                "scales its embeddings, got False"
            )
        of_ours = {ours: theirs for theirs, ours in HF_ACTIVATIONS.items()}
        rotary = {"rope_theta": self.rope_theta, "partial_rotary_factor": self.rotary_fraction}
        return {
            "architectures": ["RecurrentGemmaForCausalLM"],
            "model_type": "recurrent_gemma",
            "vocab_size": self.vocab_size,
            "hidden_size": self.features,
            "num_hidden_layers": self.num_layers,
            "intermediate_size": 2 * self.mlp_features,
            "lru_width": self.recurrent_features,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "attention_window_size": self.window,
            "conv1d_width": self.kernel_size,
            "block_types": [*self.block_types],
            "rope_parameters": {"rope_type": "default", **rotary},
            **rotary,
            "attention_bias": self.attention_bias,
            "hidden_activation": of_ours[self.activation],
            "rms_norm_eps": self.epsilon,
            "logits_soft_cap": self.logits_soft_cap,
            "tie_word_embeddings": True,
        }


class GriffinLanguageModel(LanguageModel):
    """Token embedding → Griffin blocks → RMSNorm → the token embedding again.

        >>> config = GriffinLanguageModelConfig(features=64, recurrent_features=64, mlp_features=96)
        >>> model = config.build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

        logits = cap · tanh(norm(blocks(√features · E[tokens])) Eᵀ / cap)

    The state is bounded: a block carries its recurrence, or the keys and values of a window.
    Documents that are packed into a row (`reset`) stay apart, and their positions begin at 0.

    Args:
        config: the sizes; `GriffinLanguageModelConfig.from_hf` reads them from a config.json,
            `from_state_dict` from a checkpoint.
        **options: as of every layer; parameters are initialized as in recurrentgemma.

    Layouts: `hf` (transformers' RecurrentGemmaForCausalLM, whose `lm_head.weight` is the
    embedding), `hf-file` (the same without that key, as its files have it), and, with one head of
    keys and no biases of queries, `deepmind` (the parameters of recurrentgemma's Griffin in Flax,
    their paths joined by dots) and `deepmind-torch` (its PyTorch checkpoints).

    """

    def __init__(self, config: GriffinLanguageModelConfig, **options: Unpack[NormOptions]):
        init = nnx.initializers.normal(config.features**-0.5)
        scale = float(ml_dtypes.bfloat16(config.features**0.5)) if config.scale_embeddings else 1.0
        super().__init__(
            config,
            embedding=nnx.Embed(config.vocab_size, config.features, embedding_init=init, **options),
            embedding_scale=scale,
            blocks=[
                GriffinBlock(
                    config.features,
                    config.mlp_features,
                    config.num_heads,
                    mixing=mixing,
                    recurrent_features=config.recurrent_features,
                    kernel_size=config.kernel_size,
                    num_kv_heads=config.num_kv_heads,
                    window=config.window,
                    rotary_fraction=config.rotary_fraction,
                    rope_theta=config.rope_theta,
                    attention_bias=config.attention_bias,
                    activation=config.activation,
                    epsilon=config.epsilon,
                    out_variance=2 / config.num_layers,
                    **options,
                )
                for mixing in config.mixings
            ],
            norm=ZeroCenteredRMSNorm(config.features, epsilon=config.epsilon, **options),
            logits_soft_cap=config.logits_soft_cap,
        )
