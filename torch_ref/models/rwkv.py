"""The RWKV language models in plain PyTorch, with BlinkDL's keys."""

__all__ = ["RWKVLanguageModel"]

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from torch_ref.layers.rwkv import RWKVBlock

State = tuple[Any, ...]


class RWKVSkeleton(nn.Module):
    """Token embedding → RWKV blocks → LayerNorm → Linear.

    tokens are (batch, time), the logits are (batch, time, vocab_size), and the state holds the
    states of the blocks.
    """

    context_length = None

    def __init__(self, vocab_size: int, features: int, blocks: Iterable[nn.Module]):
        super().__init__()
        self.emb = nn.Embedding(vocab_size, features)
        self.blocks = nn.ModuleList(blocks)
        self.ln_out = nn.LayerNorm(features)
        self.head = nn.Linear(features, vocab_size, bias=False)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        x, states = self.emb(tokens), []
        for i, block in enumerate(self.blocks):
            x, last = block(x, None if state is None else state[i])
            states.append(last)
        return self.head(self.ln_out(self.read_out(x))), tuple(states)

    def read_out(self, x: Tensor) -> Tensor:
        """Returns the part of the highest block's output that the head reads."""
        return x


class RWKVLanguageModel(RWKVSkeleton):
    """The RWKV-4 language model."""

    def __init__(self, vocab_size: int, features: int, num_layers: int, hidden_features: int):
        blocks = (RWKVBlock(features, hidden_features, layer_index=i) for i in range(num_layers))
        super().__init__(vocab_size, features, blocks)

    @classmethod
    def from_config(cls, config: Any) -> "RWKVLanguageModel":
        """Builds the twin of the model of a JAX config."""
        return cls(config.vocab_size, config.features, config.num_layers, config.hidden_features)
