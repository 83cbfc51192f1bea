"""The Hawk language model in plain PyTorch (Griffin, arXiv 2402.19427)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.hawk import HawkBlock


def over_time(layer: Any, x: Tensor) -> Tensor:
    """The outputs of a one-step layer over x (batch, time, features), from its zero state."""
    state = layer.init_state(x.shape[0])
    outputs = []
    for x_t in x.unbind(1):
        y_t, state = layer(x_t, state)
        outputs.append(y_t)
    return torch.stack(outputs, dim=1)


class HawkLanguageModel(nn.Module):
    """Token embedding → Hawk blocks → RMSNorm → Linear.

    index is (batch, time), the logits (batch, time, vocab_size).
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        num_layers: int,
        mlp_size: int,
        conv_kernel_size: int = 4,
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.blocks = nn.ModuleList(
            HawkBlock(hidden_size, mlp_size, conv_kernel_size) for _ in range(num_layers)
        )
        self.final_norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)

    @classmethod
    def from_config(cls, config: Any) -> "HawkLanguageModel":
        """The twin of the model that a config of the same fields describes."""
        return cls(
            config.vocab_size,
            config.features,
            config.num_layers,
            config.mlp_features,
            config.kernel_size,
        )

    def forward(self, index: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.embedding(index)
        for block in self.blocks:
            x = over_time(block, x)
        logits = self.head(self.final_norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
