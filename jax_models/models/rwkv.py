"""The RWKV-4 language model."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, Unpack

import jax.numpy as jnp
from flax import nnx

from jax_models.layers.linear import Linear
from jax_models.layers.norm import LayerNorm
from jax_models.layers.rwkv import RWKVBlock, orthogonal, other_version
from jax_models.models.language_model import BuildOptions, LanguageModel, StackConfig
from jax_models.options import FloatingDtype
from jax_models.weights import Layouts, embedding, layer_norm, linear, nested
from jax_models.weights.keys import elsewhere


@dataclasses.dataclass(frozen=True)
class RWKVLanguageModelConfig(StackConfig):
    """The RWKV-4 language model."""

    vocab_size: int = 256
    """Number of distinct tokens."""
    features: int = 192
    """Width of the model."""
    num_layers: int = 3
    """Residual blocks."""
    hidden_features: int = 768
    """Width of the channel mixes; four times `features` in RWKV-4."""

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any]) -> "RWKVLanguageModelConfig":
        """The config of a BlinkDL RWKV-4 checkpoint, read from its shapes.

        Raises:
            TypeError: the state_dict is no mapping.
            ValueError: it is a checkpoint of another RWKV version, or of no RWKV.

        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict: expected a mapping, got {type(state_dict).__name__}")
        if version := other_version(state_dict):
            raise ValueError(f"state_dict: {version}")
        needed = ("emb.weight", "blocks.0.ffn.key.weight")
        if found := elsewhere(state_dict, [{*needed}]):
            raise ValueError(f"state_dict: {found}")
        if missing := [key for key in needed if key not in state_dict]:
            raise ValueError(f"state_dict: not of an RWKV-4, it has no {' and no '.join(missing)}")
        shapes: list[tuple[int, ...]]
        shapes = [tuple(getattr(state_dict[key], "shape", ())) for key in needed]
        if any(len(shape) != 2 for shape in shapes):
            raise ValueError(f"state_dict: expected matrices {' and '.join(needed)}, got {shapes}")
        (vocab_size, features), (hidden_features, _) = shapes
        layers = {str(key).split(".")[1] for key in state_dict if str(key).startswith("blocks.")}
        return cls(
            vocab_size=int(vocab_size),
            features=int(features),
            num_layers=len(layers),
            hidden_features=int(hidden_features),
        )

    def build(self, **options: Unpack[BuildOptions]) -> "RWKVLanguageModel":
        """The model of this config."""
        return RWKVLanguageModel(self, **options)


class RWKVLanguageModel(LanguageModel):
    """Token embedding → RWKV-4 blocks → LayerNorm → Linear.

        >>> model = RWKVLanguageModelConfig(features=64, num_layers=2).build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

    Args:
        config: the sizes; `RWKVLanguageModelConfig.from_state_dict` reads them from a checkpoint.
        dtype: of the computation; by default the parameters'.
        param_dtype: of the parameters.
        rngs: draws the parameters, as RWKV-4 does.

    Layouts: `blinkdl` (RWKV-LM's checkpoints of RWKV-4).

    """

    foreign_format = staticmethod(other_version)

    def __init__(
        self,
        config: RWKVLanguageModelConfig,
        *,
        dtype: FloatingDtype | None = None,
        param_dtype: FloatingDtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.config = config
        self.embedding = nnx.Embed(
            config.vocab_size,
            config.features,
            embedding_init=partial(
                orthogonal, gain=1e-4 * max(config.vocab_size, config.features) ** 0.5
            ),
            **options,
        )
        self.pos_embedding = None
        blocks = (
            RWKVBlock(
                config.features,
                config.hidden_features,
                layer_index=index,
                num_layers=config.num_layers,
                **options,
            )
            for index in range(config.num_layers)
        )
        self.layers = config.stack(blocks)
        self.norm = LayerNorm(config.features, **options)
        self.head = Linear(
            config.features,
            config.vocab_size,
            use_bias=False,
            kernel_init=lambda *args, **kwargs: 0.5 * orthogonal(*args, **kwargs),
            **options,
        )

    def torch_layouts(self) -> Layouts:
        """`blinkdl`: the keys of an RWKV-4 checkpoint."""
        return {
            "blinkdl": [
                *embedding("embedding", "emb"),
                *nested(self.layers.torch_layouts()["blinkdl"], "layers", "blocks"),
                *layer_norm("norm", "ln_out"),
                *linear("head", "head", bias=False),
            ]
        }
