"""The language model of hippogriff (Griffin, arXiv 2402.19427)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self, Unpack

import jax.numpy as jnp
from flax import nnx

from jax_models import ops
from jax_models.layers.hippogriff import HippogriffBlock, HippogriffNorm, Version
from jax_models.models.language_model import BuildOptions, LanguageModel, StackConfig
from jax_models.options import FloatingDtype
from jax_models.weights import Layouts, nested, rms_norm, tied
from jax_models.weights.keys import elsewhere

EMBEDDING, HEAD = "embedding.weight", "lm_head.weight"
TIME = "backbone.0.time."
"""The prefix of the time_module in version 0.0.3, which need not be a Hawk."""


@dataclasses.dataclass(frozen=True)
class HippogriffLanguageModelConfig(StackConfig):
    """The language model of hippogriff."""

    vocab_size: int = 256
    """Number of distinct tokens."""
    features: int = 192
    """Width of the model."""
    num_layers: int = 2
    """Blocks, each with a recurrence and, unless `num_heads` is None, an attention."""
    hidden_features: int = 288
    """Width of the recurrences: `features` times hawk_expansion_factor, which is 3/2."""
    mlp_features: int = 384
    """Width of the gated MLPs: `features` times gmlp_expansion_factor, which is 2."""
    num_heads: int | None = 4
    """Heads of the attention; None for a model without attention."""
    num_kv_heads: int = 1
    """Heads of the keys and values."""
    window: int = 65
    """Steps that a step of the attention sees, including itself: one more than what hippogriff
    calls smqa_window_size, which is 512."""
    kernel_size: int | None = 4
    """Inputs that the causal convolution sees; None for no convolution."""
    version: Version = "0.0.2"
    """The version of hippogriff. In 0.0.3 the attention of a block comes before the recurrence."""

    def build(self, **options: Unpack[BuildOptions]) -> "HippogriffLanguageModel":
        """The model of this config."""
        return HippogriffLanguageModel(self, **options)

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any], **options: Any) -> Self:
        """The config of a checkpoint, read from its keys and shapes.

        Two fields cannot be inferred from shapes. They default to hippogriff's values, unless
        `options` give others: `num_kv_heads` (1) and `window` (513).

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

        features = size(EMBEDDING, 1)
        keys = [str(key) for key in state_dict]
        version, hawk, mlp = "0.0.2", "backbone.0.hawk", "backbone.0.hawk_gmlp"
        if any(key.startswith(TIME) for key in keys):
            version, hawk, mlp = "0.0.3", "backbone.0.time", "backbone.0.gmlp"
            if f"{hawk}.forget_base" not in keys:
                found = min(key for key in keys if key.startswith(TIME))
                raise ValueError(
                    f'state_dict: expected a hippogriff with time_module="Hawk", got {found}'
                )
        num_heads = None
        if any(key.startswith("backbone.0.smqa.") for key in keys):
            num_kv_heads = options.get("num_kv_heads", cls.num_kv_heads)
            head_features = size("backbone.0.smqa.kv.weight", 0) // (2 * num_kv_heads)
            num_heads = features // max(head_features, 1)
        has_conv = any(key.startswith(f"{hawk}.conv.") for key in keys)
        fields = {
            "vocab_size": size(EMBEDDING, 0),
            "features": features,
            "num_layers": sum(key.endswith(".forget_base") for key in keys),
            "hidden_features": size(f"{hawk}.forget_base", 0, rank=1),
            "mlp_features": size(f"{mlp}.shrink.weight", 1),
            "num_heads": num_heads,
            "window": 513,
            "kernel_size": size(f"{hawk}.conv.weight", 2, rank=3) if has_conv else None,
            "version": version,
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
                version=config.version,
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
