"""The language model of hippogriff (Griffin, arXiv 2402.19427)."""

__all__ = ["HippogriffLanguageModel", "HippogriffLanguageModelConfig"]

import dataclasses
from collections.abc import Iterable
from typing import ClassVar, Unpack

from flax import nnx

from jax_models.layers.hippogriff import HippogriffBlock, HippogriffNorm, Version
from jax_models.models.architecture import Checkpoint, Fields, Layout
from jax_models.models.configs import BlocksConfig
from jax_models.models.language_model import LanguageModel
from jax_models.options import NormOptions

TIME = "backbone.0.time."
"""The prefix of the time_module of block 0 in version 0.0.3. A time_module is not always a Hawk."""


def _sizes(checkpoint: Checkpoint) -> Fields:
    hawk = checkpoint.first("*.time.forget_base", "*.hawk.forget_base")
    mlp = checkpoint.first("*.gmlp.shrink.weight", "*.hawk_gmlp.shrink.weight")
    conv = checkpoint.first("*.hawk.conv.weight", "*.time.conv.weight")
    num_heads, num_kv_heads = None, checkpoint.given("num_kv_heads", 1)
    if checkpoint.has("*.smqa.kv.weight"):  # a matrix for both keys and values
        head_features = checkpoint.size("*.smqa.kv.weight", 0) // (2 * num_kv_heads)
        num_heads = checkpoint.features // max(head_features, 1)
    return {
        "version": "0.0.3" if checkpoint.has("*.time.forget_base") else "0.0.2",
        "hidden_features": checkpoint.size(hawk, 0, rank=1),
        "mlp_features": checkpoint.size(mlp, 1),
        "num_kv_heads": num_kv_heads,
        "num_heads": num_heads,
        "window": checkpoint.given("window", 513),
        "kernel_size": checkpoint.size(conv, 2, rank=3) if checkpoint.has(conv) else None,
    }


GRIFFIN_LM = Layout(
    "embedding.weight", "backbone", "output_norm.gamma", "lm_head.weight", sizes=_sizes
)
"""The keys of hippogriff's GriffinLM."""


@dataclasses.dataclass(frozen=True)
class HippogriffLanguageModelConfig(BlocksConfig):
    """The language model of hippogriff."""

    family: ClassVar = "hippogriff"
    marks: ClassVar = (".hawk.forget_base", TIME)
    layouts: ClassVar = {
        "hippogriff": GRIFFIN_LM,
        "hippogriff-file": GRIFFIN_LM._replace(blocks_layout="hippogriff", repeats_embedding=False),
    }
    presets: ClassVar = {"hippogriff": {}}

    num_layers: int = 2
    """Number of blocks, each with a recurrence and, unless `num_heads` is None, attention."""
    hidden_features: int = 288
    """Width of the recurrences: `features` times hawk_expansion_factor, which is 3/2."""
    mlp_features: int = 384
    """Width of the gated MLPs: `features` times gmlp_expansion_factor, which is 2."""
    num_heads: int | None = 4
    """Number of heads of the attention. None: a model without attention."""
    num_kv_heads: int = 1
    """Number of heads of the keys and values."""
    window: int = 65
    """Number of steps that the attention sees from each step, including the step itself. This is
    hippogriff's smqa_window_size, by default 512, plus one.
    """
    kernel_size: int | None = 4
    """Number of taps of the causal convolution. None: no convolution."""
    version: Version = "0.0.2"
    """The version of hippogriff, which the keys determine (`hawk` in 0.0.2, `time` in 0.0.3). In
    0.0.3, the attention of a block comes before the recurrence, and the scale of the decay is
    stored as `alpha_log_scale`.
    """

    def build(self, **options: Unpack[NormOptions]) -> "HippogriffLanguageModel":
        return HippogriffLanguageModel(self, **options)

    @classmethod
    def confused_with(cls, keys: Iterable[object]) -> str | None:
        """Describes a hippogriff whose time_module is not a Hawk, or returns None."""
        time = sorted(key for key in map(str, keys) if key.startswith(TIME))
        if not time or f"{TIME}forget_base" in time:
            return None
        return f'a hippogriff whose time_module is not "Hawk" (it has {time[0]})'


class HippogriffLanguageModel(LanguageModel):
    """Token embedding → hippogriff's blocks → RMSNorm → the token embedding again.

        >>> sizes = {"features": 64, "hidden_features": 96, "mlp_features": 128}
        >>> model = HippogriffLanguageModelConfig(**sizes).build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

        logits = norm(blocks(E[tokens])) Eᵀ

    The size of the state is bounded: a block carries the state of its recurrence, and the keys and
    values of a window. hippogriff 0.0.2 passes its window to FlashAttention with a minus sign,
    which FlashAttention 2 takes for no window. To get the numbers of a model that was trained this
    way beyond 513 steps, set a `window` as long as the text. The norms have no ε: with an input of
    zeros, hippogriff returns NaN, and the output here is zero.

    Args:
        config: the sizes. `HippogriffLanguageModelConfig.from_state_dict` reads them from a
            checkpoint.
        **options: as for every layer. Parameters are initialized as in hippogriff.

    Layouts: `hippogriff` (its GriffinLM, whose `lm_head.weight` is the embedding) and
    `hippogriff-file` (the same without that key, as in safetensors files).

    """

    def __init__(self, config: HippogriffLanguageModelConfig, **options: Unpack[NormOptions]):
        init = nnx.initializers.normal(config.features**-0.5)
        super().__init__(
            config,
            embedding=nnx.Embed(config.vocab_size, config.features, embedding_init=init, **options),
            blocks=[config.make(HippogriffBlock, **options) for _ in range(config.num_layers)],
            norm=HippogriffNorm(config.features, **options),
        )
