"""The language model of hippogriff (Griffin, arXiv 2402.19427)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self, Unpack

import jax.numpy as jnp
from flax import nnx

from jax_models import ops
from jax_models.layers.hippogriff import HippogriffBlock, HippogriffNorm
from jax_models.models.language_model import BuildOptions, LanguageModel, StackConfig
from jax_models.options import FloatingDtype
from jax_models.weights import Layouts, nested, rms_norm, tied
from jax_models.weights.keys import elsewhere

EMBEDDING, HEAD = "embedding.weight", "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class HippogriffLanguageModelConfig(StackConfig):
    """The language model of hippogriff."""

    vocab_size: int = 256
    """Number of distinct tokens."""
    features: int = 192
    """Width of the model."""
    num_layers: int = 2
    """Blocks, each with a recurrence and an attention."""
    hidden_features: int = 288
    """Width of the recurrences: `features` times hawk_expansion_factor, which is 3/2."""
    mlp_features: int = 384
    """Width of the gated MLPs: `features` times gmlp_expansion_factor, which is 2."""
    num_heads: int = 4
    """Heads of the attention."""
    num_kv_heads: int = 1
    """Heads of the keys and values."""
    window: int = 65
    """Steps that a step of the attention sees, itself among them: one more than what hippogriff
    calls smqa_window_size, which is 512."""
    kernel_size: int = 4
    """Inputs that the causal convolution sees."""

    def build(self, **options: Unpack[BuildOptions]) -> "HippogriffLanguageModel":
        """The model of this config."""
        return HippogriffLanguageModel(self, **options)

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any], **options: Any) -> Self:
        """The config of a checkpoint, read from its shapes.

        What no shape tells is as in hippogriff, unless `options` say otherwise: `num_kv_heads` (1)
        and `window` (513).

        Raises:
            TypeError: the state_dict is no mapping, or there is no such option.
            ValueError: it is not a checkpoint of such a model.

        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict: expected a mapping, got {type(state_dict).__name__}")

        def size(key: str, axis: int, rank: int = 2) -> int:
            shape = getattr(state_dict.get(key), "shape", None)
            if shape is None:
                found = elsewhere(state_dict, [{EMBEDDING, HEAD}])
                raise ValueError(f"state_dict: {found or f'not of a hippogriff, it has no {key}'}")
            if len(shape) != rank:
                raise ValueError(f"state_dict: {key}: expected {rank} axes, got {tuple(shape)}")
            return shape[axis]

        first = "backbone.0"
        features = size(EMBEDDING, 1)
        num_kv_heads = options.get("num_kv_heads", cls.num_kv_heads)
        head_features = size(f"{first}.smqa.kv.weight", 0) // (2 * num_kv_heads)
        fields = {
            "vocab_size": size(EMBEDDING, 0),
            "features": features,
            "num_layers": sum(str(key).endswith(".hawk.forget_base") for key in state_dict),
            "hidden_features": size(f"{first}.hawk.forget_base", 0, rank=1),
            "mlp_features": size(f"{first}.hawk_gmlp.shrink.weight", 1),
            "num_heads": features // max(head_features, 1),
            "window": 513,
            "kernel_size": size(f"{first}.hawk.conv.weight", 2, rank=3),
        }
        return cls(**fields | options)


class HippogriffLanguageModel(LanguageModel):
    """Token embedding → hippogriff's blocks → RMSNorm → the token embedding again.

        >>> sizes = {"features": 64, "hidden_features": 96, "mlp_features": 128}
        >>> model = HippogriffLanguageModelConfig(**sizes).build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

        logits = norm(layers(E[tokens])) Eᵀ

    The state is bounded: a block carries its recurrence, and the keys and values of a window.

    Args:
        config: the sizes; `HippogriffLanguageModelConfig.from_state_dict` reads them from a
            checkpoint.
        dtype: of the computation; by default the parameters'.
        param_dtype: of the parameters.
        rngs: draws the parameters, as hippogriff does.

    Layouts: `hippogriff` (its GriffinLM, whose `lm_head.weight` is the embedding) and
    `hippogriff-file` (the same without that key, as safetensors have it).

    """

    def __init__(
        self,
        config: HippogriffLanguageModelConfig,
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
            embedding_init=nnx.initializers.normal(config.features**-0.5),
            **options,
        )
        self.pos_embedding = None
        blocks = (
            HippogriffBlock(
                config.features,
                config.mlp_features,
                config.num_heads,
                hidden_features=config.hidden_features,
                kernel_size=config.kernel_size,
                num_kv_heads=config.num_kv_heads,
                window=config.window,
                **options,
            )
            for _ in range(config.num_layers)
        )
        self.layers = config.stack(blocks)
        self.norm = HippogriffNorm(config.features, **options)

    def head(self, x):
        """`x Eᵀ`."""
        return ops.affine(x, self.embedding.embedding[...].T.astype(x.dtype)).astype(x.dtype)

    def torch_layouts(self) -> Layouts:
        """`hippogriff`: its keys; without those of the head."""
        layers = [
            *nested(self.layers.torch_layouts()["hippogriff"], "layers", "backbone"),
            *rms_norm("norm", "output_norm", "gamma"),
        ]
        return {
            layout: [tied("embedding.embedding", (EMBEDDING, *head)), *layers]
            for layout, head in (("hippogriff", (HEAD,)), ("hippogriff-file", ()))
        }
