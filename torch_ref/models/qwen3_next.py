"""Qwen3-Next in plain PyTorch, with the keys of transformers."""

__all__ = ["Qwen3NextLanguageModel"]

from typing import Any

from torch import nn

from torch_ref.layers.gated_delta_net import Qwen3NextGatedDeltaNet
from torch_ref.layers.mlp import GatedMLP
from torch_ref.layers.norm import ZeroCenteredRMSNorm
from torch_ref.models.hybrid import HybridLanguageModel
from torch_ref.models.qwen3_5 import Qwen35Block, Qwen35Experts


class Qwen3NextBlock(Qwen35Block):
    """A block of Qwen3.5 whose Gated DeltaNet has the keys of Qwen3-Next."""

    mixer = Qwen3NextGatedDeltaNet


class Qwen3NextLanguageModel(HybridLanguageModel):
    """Token embedding → blocks with Gated DeltaNet or gated attention → RMSNorm → Linear."""

    @classmethod
    def from_config(cls, config: Any) -> "Qwen3NextLanguageModel":
        """Builds the twin of the model of a JAX config."""

        def mlp(number: int) -> nn.Module:
            if config.num_experts and number not in config.dense_layers:
                return Qwen35Experts(config, config.shared_features, config.normalize_experts)
            return GatedMLP(config.features, config.mlp_features, activation="silu")

        blocks: list[nn.Module] = [
            Qwen3NextBlock(config, kind, mlp(number)) for number, kind in enumerate(config.mixings)
        ]
        return cls(config, blocks, ZeroCenteredRMSNorm(config.features, epsilon=config.epsilon))
