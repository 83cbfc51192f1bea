"""The causal self-attention in plain PyTorch to which The Annotated Hyena compares Hyena."""

__all__ = ["CausalSelfAttention", "SelfAttentionBlock"]

import torch
from torch import Tensor, nn

from torch_ref.layers.state import State


class CausalSelfAttention(nn.Module):
    """`softmax(q kᵀ / √d + mask) v` in each head, where the mask is −∞ above the diagonal.

    x is (batch, time, features), and the state is (inputs,), which holds all inputs so far. The
    dropout applies to the attention weights.
    """

    def __init__(self, features: int, num_heads: int, *, dropout_rate: float = 0.0):
        if features % num_heads:
            raise ValueError(
                f"num_heads: expected a divisor of features={features}, got {num_heads}"
            )
        super().__init__()
        self.attn = nn.MultiheadAttention(
            features, num_heads, dropout=dropout_rate, batch_first=True
        )

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        # The state holds all inputs so far, from which the keys and values are computed again.
        inputs = x if state is None else torch.cat([state[0], x], dim=1)
        time, past = x.shape[1], inputs.shape[1] - x.shape[1]
        shape = time, past + time
        # Each step sees the past and itself.
        mask = torch.ones(shape, dtype=torch.bool, device=x.device).triu(past + 1)
        y, _ = self.attn(x, inputs, inputs, attn_mask=mask, need_weights=False)
        return y, (inputs,)


class SelfAttentionBlock(nn.Module):
    """`x ← x + attention(ln1(x))`, then `x ← x + mlp(ln3(x))`, with the exact gelu.

    The state is that of the attention.
    """

    def __init__(self, features: int, num_heads: int, *, dropout_rate: float = 0.0):
        super().__init__()
        self.ln1 = nn.LayerNorm(features)
        self.ln3 = nn.LayerNorm(features)
        self.self_attn = CausalSelfAttention(features, num_heads, dropout_rate=dropout_rate)
        self.mlp = nn.Sequential(
            nn.Linear(features, 4 * features),
            nn.GELU(),
            nn.Linear(4 * features, features),
            nn.Dropout(dropout_rate),
        )

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        y, last = self.self_attn(self.ln1(x), state)
        x = x + y
        return x + self.mlp(self.ln3(x)), last
