"""A causal convolution over time in plain PyTorch."""

__all__ = ["CausalConv1d"]

import torch
from torch import Tensor, nn

from torch_ref.layers.state import State


class CausalConv1d(nn.Module):
    """A depthwise convolution over the last kernel_size inputs.

    x is (batch, time, features), and the state is (inputs,), which holds the last inputs, (batch,
    features, kernel_size − 1).
    """

    def __init__(self, features: int, kernel_size: int):
        super().__init__()
        self.conv = nn.Conv1d(features, features, kernel_size, groups=features)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        [inputs] = self.init_state(x.shape[0]) if state is None else state
        window = torch.cat([inputs, x.mT], dim=-1)
        return self.conv(window).mT, (window[:, :, x.shape[1] :],)

    def init_state(self, batch_size: int) -> State:
        features, _, kernel_size = self.conv.weight.shape
        return (self.conv.weight.new_zeros(batch_size, features, kernel_size - 1),)
