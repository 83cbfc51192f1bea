"""LFM2's gated short convolution in plain PyTorch, with the keys of transformers."""

__all__ = ["ShortConvolution"]

import torch
from torch import Tensor, nn

from torch_ref.layers.state import State


class ShortConvolution(nn.Module):
    """A causal depthwise convolution between two gates.

        B, C, u = x W_in + b_in         side by side
        y = (C ⊙ conv(B ⊙ u)) W_out + b_out

    x and y are (batch, time, features). The state is (the last kernel_size − 1 inputs of the
    convolution,), each (batch, features, kernel_size − 1), the oldest first.
    """

    def __init__(self, features: int, *, kernel_size: int = 3, use_bias: bool = False):
        super().__init__()
        self.in_proj = nn.Linear(features, 3 * features, bias=use_bias)
        self.conv = nn.Conv1d(features, features, kernel_size, groups=features, bias=use_bias)
        self.out_proj = nn.Linear(features, features, bias=use_bias)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        (past,) = self.init_state(x.shape[0]) if state is None else state
        B, C, u = self.in_proj(x).chunk(3, dim=-1)
        window = torch.cat([past.to(x.dtype), (B * u).mT], dim=-1)
        y = self.out_proj(C * self.conv(window).mT)
        return y, (window[..., x.shape[1] :],)

    def init_state(self, batch_size: int) -> State:
        features, _, kernel_size = self.conv.weight.shape
        return (self.conv.weight.new_zeros(batch_size, features, kernel_size - 1),)
