"""The RWKV-6 language model in plain PyTorch, with BlinkDL's keys."""

__all__ = ["RWKV6LanguageModel"]

from typing import Any

from torch_ref.layers.rwkv6 import RWKV6Block
from torch_ref.models.rwkv import RWKVSkeleton


class RWKV6LanguageModel(RWKVSkeleton):
    """The RWKV-6 language model."""

    def __init__(
        self,
        vocab_size: int,
        features: int,
        num_layers: int,
        hidden_features: int,
        *,
        head_size: int,
        mix_rank: int,
        decay_rank: int,
    ):
        sizes = {"head_size": head_size, "mix_rank": mix_rank, "decay_rank": decay_rank}
        blocks = (
            RWKV6Block(features, hidden_features, layer_index=i, **sizes) for i in range(num_layers)
        )
        super().__init__(vocab_size, features, blocks)

    @classmethod
    def from_config(cls, config: Any) -> "RWKV6LanguageModel":
        """Builds the twin of the model of a JAX config."""
        return cls(
            config.vocab_size,
            config.features,
            config.num_layers,
            config.hidden_features,
            head_size=config.head_size,
            mix_rank=config.mix_rank,
            decay_rank=config.decay_rank,
        )
