"""The RWKV-7 language model in plain PyTorch, with BlinkDL's keys."""

__all__ = ["RWKV7LanguageModel"]

from typing import Any

from torch import Tensor

from torch_ref.layers.rwkv7 import RWKV7Block
from torch_ref.models.rwkv import RWKVSkeleton


class RWKV7LanguageModel(RWKVSkeleton):
    """The RWKV-7 language model."""

    def __init__(
        self,
        vocab_size: int,
        features: int,
        num_layers: int,
        hidden_features: int,
        *,
        head_size: int,
        decay_rank: int,
        rate_rank: int,
        value_rank: int,
        gate_rank: int,
    ):
        sizes = {
            "head_size": head_size,
            "decay_rank": decay_rank,
            "rate_rank": rate_rank,
            "value_rank": value_rank,
            "gate_rank": gate_rank,
        }
        blocks = (
            RWKV7Block(features, hidden_features, layer_index=i, **sizes) for i in range(num_layers)
        )
        super().__init__(vocab_size, features, blocks)

    @classmethod
    def from_config(cls, config: Any) -> "RWKV7LanguageModel":
        """Builds the twin of the model of a JAX config."""
        return cls(
            config.vocab_size,
            config.features,
            config.num_layers,
            config.hidden_features,
            head_size=config.head_size,
            decay_rank=config.decay_rank,
            rate_rank=config.rate_rank,
            value_rank=config.value_rank,
            gate_rank=config.gate_rank,
        )

    def read_out(self, x: Tensor) -> Tensor:
        """Returns the output without the values of the lowest block, which follow it."""
        return x.chunk(2, dim=-1)[0]
