"""The Hawk language model in plain PyTorch (Griffin, arXiv 2402.19427)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.hawk import Hawk, HawkState


class GatedMLP(nn.Module):
    """`y = (gelu(x W_gate) ⊙ x W_up) W_down`, with the exact gelu."""

    def __init__(self, hidden_size: int, mlp_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, mlp_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, mlp_size, bias=False)
        self.down_proj = nn.Linear(mlp_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))


class HawkBlock(nn.Module):
    """`x ← x + hawk(norm(x))`, then `x ← x + mlp(norm(x))`, one step."""

    def __init__(self, hidden_size: int, mlp_size: int, conv_kernel_size: int = 4):
        super().__init__()
        self.temporal_pre_norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.hawk = Hawk(hidden_size, conv_kernel_size)
        self.channel_pre_norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.mlp = GatedMLP(hidden_size, mlp_size)

    def forward(self, x: Tensor, state: HawkState) -> tuple[Tensor, HawkState]:
        y, state = self.hawk(self.temporal_pre_norm(x), state)
        x = x + y
        return x + self.mlp(self.channel_pre_norm(x)), state

    def init_state(self, batch_size: int) -> HawkState:
        return self.hawk.init_state(batch_size)


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
