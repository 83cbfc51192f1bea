"""xLSTM-7B in plain PyTorch, with the keys of transformers."""

__all__ = ["XLSTMLanguageModel"]

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.mlstm import MLSTM
from torch_ref.models.hybrid import State


class FeedForward(nn.Module):
    """`y = (silu(x W_gate) ⊙ x W_up) W_down`. If `fused`, a matrix holds W_gate and W_up."""

    def __init__(self, features: int, mlp_features: int, fused: bool):
        super().__init__()
        self.fused = fused
        if fused:
            self.proj_up_gate_z = nn.Linear(features, 2 * mlp_features, bias=False)
        else:
            self.proj_up_gate = nn.Linear(features, mlp_features, bias=False)
            self.proj_up = nn.Linear(features, mlp_features, bias=False)
        self.proj_down = nn.Linear(mlp_features, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            gate, up = self.proj_up_gate_z(x).chunk(2, dim=-1)
        else:
            gate, up = self.proj_up_gate(x), self.proj_up(x)
        return self.proj_down(F.silu(gate) * up)


class XLSTMBlock(nn.Module):
    """`x ← x + mlstm(norm(x))`, then `x ← x + mlp(norm(x))`; the state is that of the mLSTM."""

    def __init__(self, config: Any, fused: bool):
        super().__init__()
        self.norm_mlstm = nn.RMSNorm(config.features, eps=config.epsilon)
        self.mlstm_layer = MLSTM(
            config.features,
            num_heads=config.num_heads,
            key_features=config.key_features,
            value_features=config.value_features,
            gate_soft_cap=config.gate_soft_cap,
            normalizer_epsilon=config.normalizer_epsilon,
            epsilon=config.epsilon,
            fused=fused,
        )
        self.norm_ffn = nn.RMSNorm(config.features, eps=config.epsilon)
        self.ffn = FeedForward(config.features, config.mlp_features, fused)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        y, last = self.mlstm_layer(self.norm_mlstm(x), state)
        x = x + y
        return x + self.ffn(self.norm_ffn(x)), last


class Backbone(nn.Module):
    """Token embedding → blocks → RMSNorm."""

    def __init__(self, config: Any, fused: bool):
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.features)
        self.blocks = nn.ModuleList(XLSTMBlock(config, fused) for _ in range(config.num_layers))
        self.out_norm = nn.RMSNorm(config.features, eps=config.epsilon)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        x, states = self.embeddings(tokens), []
        for i, block in enumerate(self.blocks):
            x, last = block(x, None if state is None else state[i])
            states.append(last)
        return self.out_norm(x), tuple(states)


class XLSTMLanguageModel(nn.Module):
    """The backbone → Linear → c tanh(· / c).

    tokens are (batch, time), the logits are (batch, time, vocab_size), and the state holds the
    states of the blocks.
    """

    context_length = None

    def __init__(self, config: Any, *, fused: bool = False):
        super().__init__()
        self.soft_cap = config.logits_soft_cap
        self.backbone = Backbone(config, fused)
        self.lm_head = nn.Linear(config.features, config.vocab_size, bias=False)

    @classmethod
    def from_config(cls, config: Any) -> "XLSTMLanguageModel":
        """Builds the twin of the model of a JAX config."""
        return cls(config)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        x, states = self.backbone(tokens, state)
        return self.soft_cap * torch.tanh(self.lm_head(x) / self.soft_cap), states
