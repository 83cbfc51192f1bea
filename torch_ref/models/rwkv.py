"""The RWKV-4 language model in plain PyTorch, under BlinkDL's keys."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.rwkv import RWKVBlock


class RWKVLanguageModel(nn.Module):
    """Token embedding → RWKV blocks → LayerNorm → Linear.

    index is (batch, time), the logits (batch, time, vocab_size).
    """

    def __init__(self, vocab_size: int, features: int, num_layers: int, hidden_features: int):
        super().__init__()
        self.emb = nn.Embedding(vocab_size, features)
        self.blocks = nn.ModuleList(
            RWKVBlock(features, hidden_features, first=layer == 0) for layer in range(num_layers)
        )
        self.ln_out = nn.LayerNorm(features)
        self.head = nn.Linear(features, vocab_size, bias=False)

    @classmethod
    def from_config(cls, config: Any) -> "RWKVLanguageModel":
        """The twin of the model that a config of the same fields describes."""
        return cls(config.vocab_size, config.features, config.num_layers, config.hidden_features)

    def forward(self, index: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.emb(index)
        for block in self.blocks:
            x, _ = block(x)
        logits = self.head(self.ln_out(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
