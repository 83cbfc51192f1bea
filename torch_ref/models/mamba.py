"""The language models Mamba and FalconMamba in plain PyTorch, with the keys of transformers."""

__all__ = ["MambaLanguageModel"]

from typing import Any

from torch_ref.layers.mamba import Mamba
from torch_ref.models.state_space import StateSpaceLanguageModel


class MambaLanguageModel(StateSpaceLanguageModel):
    """Token embedding → blocks with a `Mamba` each → RMSNorm → Linear."""

    @staticmethod
    def mixer(config: Any) -> Mamba:
        return Mamba(
            config.features,
            inner_features=config.inner_features,
            state_features=config.state_features,
            dt_rank=config.dt_rank,
            kernel_size=config.kernel_size,
            use_bias=config.use_bias,
            conv_bias=config.conv_bias,
            norm="plain" if config.mixer_norm else None,
            epsilon=config.mixer_epsilon,
        )
