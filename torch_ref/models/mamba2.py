"""The Mamba-2 language model in plain PyTorch, with the keys of transformers."""

__all__ = ["Mamba2LanguageModel"]

from typing import Any

from torch_ref.layers.mamba2 import Mamba2
from torch_ref.models.state_space import StateSpaceLanguageModel


class Mamba2LanguageModel(StateSpaceLanguageModel):
    """Token embedding → blocks with a `Mamba2` each → RMSNorm → Linear."""

    @staticmethod
    def mixer(config: Any) -> Mamba2:
        return Mamba2(
            config.features,
            num_heads=config.num_heads,
            head_features=config.head_features,
            state_features=config.state_features,
            num_groups=config.num_groups,
            kernel_size=config.kernel_size,
            use_bias=config.use_bias,
            conv_bias=config.conv_bias,
            dt_limits=config.dt_limits,
            epsilon=config.epsilon,
        )
