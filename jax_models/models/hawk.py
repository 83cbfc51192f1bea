"""The Hawk language model (Griffin, arXiv 2402.19427, section 2)."""

__all__ = ["HawkLanguageModel", "HawkLanguageModelConfig"]

import dataclasses
from typing import ClassVar, Unpack

from flax import nnx

from jax_models.layers.hawk import HawkBlock
from jax_models.layers.linear import Linear
from jax_models.layers.norm import RMSNorm
from jax_models.layers.rg_lru import Parameterization
from jax_models.models.architecture import Checkpoint, Fields, Layout
from jax_models.models.configs import BlocksConfig
from jax_models.models.language_model import LanguageModel
from jax_models.options import NormOptions


def _sizes(checkpoint: Checkpoint) -> Fields:
    return {
        "mlp_features": checkpoint.size("*.mlp.gate_proj.weight", 0),
        "kernel_size": checkpoint.size("*.hawk.conv.conv.weight", 2, rank=3),
        "parameterization": "softplus" if checkpoint.has("*.hawk.rglru.a_param") else "direct",
    }


@dataclasses.dataclass(frozen=True)
class HawkLanguageModelConfig(BlocksConfig):
    """The config of the Hawk language model."""

    family: ClassVar = "Hawk"
    unsaved_values: ClassVar = {"parameterization": "direct"}
    layouts: ClassVar = {
        "hawk": Layout(
            "embedding.weight",
            "blocks",
            "final_norm.weight",
            "head.weight",
            sizes=_sizes,
        ),
    }
    presets: ClassVar = {"hawk": {"model.parameterization": "softplus"}}

    mlp_features: int = 576
    """Width of the gated MLPs; three times `features` in the paper."""
    kernel_size: int = 4
    """Number of taps of the causal convolution."""
    parameterization: Parameterization | None = None
    """The parameter of the RG-LRUs: a_param ("softplus") or the decay a ("direct"). None:
    "softplus", until `from_torch` loads weights with a; `RGLRU` explains why.
    """

    def build(self, **options: Unpack[NormOptions]) -> "HawkLanguageModel":
        return HawkLanguageModel(self, **options)


class HawkLanguageModel(LanguageModel):
    """Token embedding → Hawk blocks → RMSNorm → Linear.

        >>> config = HawkLanguageModelConfig(features=64)
        >>> model = config.build(rngs=nnx.Rngs(0))
        >>> logits, state = model(jnp.zeros((8, 100), int))

    Args:
        config: the sizes.
        **options: as for every layer.

    Layouts: `hawk` (torch_ref.HawkLanguageModel).

    """

    def __init__(self, config: HawkLanguageModelConfig, **options: Unpack[NormOptions]):
        super().__init__(
            config,
            embedding=nnx.Embed(config.vocab_size, config.features, **options),
            blocks=[config.make(HawkBlock, **options) for _ in range(config.num_layers)],
            norm=RMSNorm(config.features, **options),
            head=Linear(config.features, config.vocab_size, use_bias=False, **options),
        )
