"""The RWKV-4 language model, and what the language models of all RWKV versions share."""

import dataclasses
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jax_models.layers.linear import Linear
from jax_models.layers.norm import LayerNorm
from jax_models.layers.rwkv import RWKVBlock, orthogonal
from jax_models.layers.rwkv_version import foreign_to
from jax_models.models.language_model import BuildOptions, LanguageModel, StackConfig
from jax_models.options import FloatingDtype, Initializer
from jax_models.sequence import SequenceLayer
from jax_models.weights import Layouts, embedding, layer_norm, linear, nested
from jax_models.weights.keys import elsewhere, joined

PARTS = {
    "blinkdl": ("emb", "blocks", "ln_out", "head"),
    "fla": ("model.embeddings", "model.layers", "model.norm", "lm_head"),
    "hf": ("rwkv.embeddings", "rwkv.blocks", "rwkv.ln_out", "head"),
}
"""What the layouts call the embedding, the blocks, the last norm and the head."""


class Size(NamedTuple):
    """Where a checkpoint tells a field: in a matrix, along an axis, as one of some parts."""

    key: str
    axis: int
    parts: int = 1


Sizes = dict[str, dict[str, Size]]
"""By layout and field."""


@dataclasses.dataclass(frozen=True)
class RWKVConfig(StackConfig):
    """What the configs of all RWKV language models share."""

    version: ClassVar[str]
    sizes: ClassVar[Sizes]

    features: int = 192
    """Width of the model."""
    num_layers: int = 3
    """Residual blocks."""

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any]) -> Self:
        """The config of a checkpoint, read from its shapes, in any of the model's layouts.

        Raises:
            TypeError: the state_dict is no mapping.
            ValueError: it is a checkpoint of another RWKV version, or of no RWKV.

        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict: expected a mapping, got {type(state_dict).__name__}")
        if message := foreign_to(cls.version)(state_dict):
            raise ValueError(f"state_dict: {message}")
        keys = {name: [size.key for size in sizes.values()] for name, sizes in cls.sizes.items()}
        layout = max(keys, key=lambda name: len({*keys[name]} & state_dict.keys()))
        blocks = f"{PARTS[layout][1]}."
        names = [str(key) for key in state_dict]
        layers = {key.split(".")[blocks.count(".")] for key in names if key.startswith(blocks)}
        if layers != {str(i) for i in range(len(layers))}:
            numbers = ", ".join(joined(f"{blocks}{layer}" for layer in sorted(layers)))
            raise ValueError(f"state_dict: expected blocks numbered from 0 on, got {numbers}")
        optional = cls.optional(len(layers))
        sizes = {
            field: size
            for field, size in cls.sizes[layout].items()
            if field not in optional or size.key in state_dict
        }
        if missing := [size.key for size in sizes.values() if size.key not in state_dict]:
            if found := elsewhere(state_dict, [{*each} for each in keys.values()]):
                raise ValueError(f"state_dict: {found}")
            absent = " and no ".join(joined(dict.fromkeys(missing)))
            raise ValueError(f"state_dict: not of an {cls.version}, it has no {absent}")
        shapes = {
            size.key: tuple(getattr(state_dict[size.key], "shape", ())) for size in sizes.values()
        }
        if wrong := [f"{key} of {shape}" for key, shape in shapes.items() if len(shape) != 2]:
            raise ValueError(f"state_dict: expected matrices, got {', '.join(wrong)}")
        fields = {
            field: int(shapes[key][axis]) // parts for field, (key, axis, parts) in sizes.items()
        }
        return cls(num_layers=len(layers), **fields, **cls.options(state_dict))

    @classmethod
    def optional(cls, num_layers: int) -> tuple[str, ...]:
        """The fields that a checkpoint of so many layers may not tell."""
        return ()

    @classmethod
    def options(cls, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that are no sizes."""
        return {}


def undivided(state_dict: Mapping[str, Any], every: int) -> dict[str, Any]:
    """The weights as they were before transformers' RwkvForCausalLM first ran in evaluation.

    With a `rescale_every` it then divides the last matrices of block i by 2^(i // rescale_every),
    in place, so that what is saved later has them divided.
    """
    last = re.compile(r"rwkv\.blocks\.(\d+)\.(attention\.output|feed_forward\.value)\.weight")
    return {
        key: value * 2 ** (int(block[1]) // every) if (block := last.fullmatch(key)) else value
        for key, value in state_dict.items()
    }


class RWKVSkeleton(LanguageModel):
    """Token embedding → blocks → LayerNorm → Linear."""

    def __init__(
        self,
        config: RWKVConfig,
        blocks: list[SequenceLayer],
        *,
        embedding_init: Initializer,
        dtype: FloatingDtype | None,
        param_dtype: FloatingDtype,
        rngs: nnx.Rngs,
    ):
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.config = config
        self.embedding = nnx.Embed(
            config.vocab_size, config.features, embedding_init=embedding_init, **options
        )
        self.pos_embedding = None
        self.layers = config.stack(blocks)
        self.norm = LayerNorm(config.features, **options)
        self.head = Linear(
            config.features, config.vocab_size, use_bias=False, kernel_init=half, **options
        )

    def torch_layouts(self) -> Layouts:
        """The layouts that the blocks have: the keys of a checkpoint."""
        layouts = {}
        for layout, blocks in self.layers.torch_layouts().items():
            emb, layers, ln_out, head = PARTS[layout]
            layouts[layout] = [
                *embedding("embedding", emb),
                *nested(blocks, "layers", layers),
                *layer_norm("norm", ln_out),
                *linear("head", head, bias=False),
            ]
        return layouts


def half(*args, **kwargs) -> Array:
    """Half of `orthogonal`."""
    return 0.5 * orthogonal(*args, **kwargs)


def small_uniform(key, shape: tuple[int, int], dtype, **_) -> Array:
    """How RWKV-6 and RWKV-7 draw embeddings: uniform in ±1e-4."""
    return jax.random.uniform(key, shape, dtype, -1e-4, 1e-4)


@dataclasses.dataclass(frozen=True)
class RWKVLanguageModelConfig(RWKVConfig):
    """The RWKV-4 language model."""

    version: ClassVar[str] = "RWKV-4"
    sizes: ClassVar[Sizes] = {
        "blinkdl": {
            "vocab_size": Size("emb.weight", 0),
            "features": Size("emb.weight", 1),
            "hidden_features": Size("blocks.0.ffn.key.weight", 0),
        },
        "hf": {
            "vocab_size": Size("rwkv.embeddings.weight", 0),
            "features": Size("rwkv.embeddings.weight", 1),
            "hidden_features": Size("rwkv.blocks.0.feed_forward.key.weight", 0),
        },
    }

    vocab_size: int = 256
    """Number of distinct tokens."""
    features: int = 192
    """Width of the model."""
    num_layers: int = 3
    """Residual blocks."""
    hidden_features: int = 768
    """Width of the channel mixes; four times `features` in RWKV-4."""

    def to_hf(self) -> dict[str, Any]:
        """The config.json of this model as an RWKV of transformers."""
        return {
            "architectures": ["RwkvForCausalLM"],
            "model_type": "rwkv",
            "vocab_size": self.vocab_size,
            "hidden_size": self.features,
            "attention_hidden_size": self.features,
            "num_hidden_layers": self.num_layers,
            "intermediate_size": self.hidden_features,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": False,
        }

    def build(self, **options: Unpack[BuildOptions]) -> "RWKVLanguageModel":
        """The model of this config."""
        return RWKVLanguageModel(self, **options)


class RWKVLanguageModel(RWKVSkeleton):
    """Token embedding → RWKV-4 blocks → LayerNorm → Linear.

        >>> model = RWKVLanguageModelConfig(features=64, num_layers=2).build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

    Args:
        config: the sizes; `RWKVLanguageModelConfig.from_state_dict` reads them from a checkpoint.
        dtype: of the computation; by default the parameters'.
        param_dtype: of the parameters.
        rngs: draws the parameters, as RWKV-4 does.

    Layouts: `blinkdl` (RWKV-LM's checkpoints of RWKV-4), `hf` (transformers' RwkvForCausalLM).

    """

    foreign_format = staticmethod(foreign_to("RWKV-4"))

    def __init__(
        self,
        config: RWKVLanguageModelConfig,
        *,
        dtype: FloatingDtype | None = None,
        param_dtype: FloatingDtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        blocks: list[SequenceLayer] = [
            RWKVBlock(
                config.features,
                config.hidden_features,
                layer_index=index,
                num_layers=config.num_layers,
                **options,
            )
            for index in range(config.num_layers)
        ]
        gain = 1e-4 * max(config.vocab_size, config.features) ** 0.5
        super().__init__(config, blocks, embedding_init=partial(orthogonal, gain=gain), **options)
