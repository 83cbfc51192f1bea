"""Norms in plain PyTorch."""

__all__ = ["ZeroCenteredRMSNorm"]

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ZeroCenteredRMSNorm(nn.Module):
    """`x / √(mean(x²) + ε) · (1 + weight)`."""

    def __init__(self, features: int, *, epsilon: float = 1e-6):
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.epsilon) * (1 + self.weight)
