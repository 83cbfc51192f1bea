"""The filters of HyenaDNA in plain PyTorch (arXiv 2306.15794), with HyenaDNA's keys.

`t` and `deltas` are buffers in HyenaDNA, and parameters with requires_grad=False here.
"""

__all__ = ["HyenaDNAFilter"]

import math

import torch
from torch import Tensor, nn

from torch_ref.layers.hyena_filter import Sin, check_length, decay_rates


class HyenaDNAPosition(nn.Module):
    """Trained rows, initially `[t/(L−1), cos(2πft/L) …, −sin(2πft/L) …]`, and the times t/(L−1).

    L is max_length, embed_features is 2K + 1, and f takes K evenly spaced values from 1e-4 to
    K − 1.
    """

    def __init__(self, embed_features: int, max_length: int):
        super().__init__()
        bands = embed_features // 2
        t = torch.linspace(0, 1, max_length)[None, :, None]
        angle = 2 * math.pi * torch.arange(max_length)[None, :, None] / max_length
        angle = angle * torch.linspace(1e-4, bands - 1, bands)
        self.z = nn.Parameter(torch.cat([t, angle.cos(), -angle.sin()], dim=-1))
        self.t = nn.Parameter(t, requires_grad=False)


class HyenaDNAWindow(nn.Module):
    """`h ⊙ (e^{−t|δ|} + shift)`, with a fixed decay δ per channel, or h if not `modulate`."""

    def __init__(self, features: int, shift: float, modulate: bool):
        super().__init__()
        self.shift, self.modulate = shift, modulate
        self.deltas = nn.Parameter(decay_rates(features).mT, requires_grad=False)

    def forward(self, t: Tensor, h: Tensor) -> Tensor:
        return h * (torch.exp(-t * self.deltas.abs()) + self.shift) if self.modulate else h


class HyenaDNAFilter(nn.Module):
    """`filter(L)` is (order, features, L): a network whose layers share one trained sine.

    With `normalized`, the windowed taps of all filters at a step are divided by their L1 norm.
    """

    def __init__(
        self,
        features: int,
        max_length: int,
        *,
        order: int = 1,
        embed_features: int = 5,
        mlp_features: int = 64,
        num_filter_layers: int = 4,
        omega: float = 10,
        shift: float = 0.05,
        modulate: bool = True,
        normalized: bool = False,
        filter_bias: bool = True,
    ):
        super().__init__()
        self.max_length = max_length
        self.sizes = (order, features)
        self.normalized = normalized
        self.bias = nn.Parameter(torch.randn(order * features), requires_grad=filter_bias)
        self.pos_emb = HyenaDNAPosition(embed_features, max_length)
        # All layers of the network share one sine, whose frequency is trained.
        sine = Sin(mlp_features, omega)
        sine.freq.requires_grad = True
        self.implicit_filter = nn.Sequential(nn.Linear(embed_features, mlp_features), sine)
        for _ in range(num_filter_layers - 2):
            self.implicit_filter.append(nn.Linear(mlp_features, mlp_features))
            self.implicit_filter.append(sine)
        self.implicit_filter.append(nn.Linear(mlp_features, order * features, bias=False))
        self.modulation = HyenaDNAWindow(order * features, shift, modulate)

    def forward(self, length: int) -> Tensor:
        check_length(length, self.max_length)
        # A small network maps each position to the taps there, and the window lets them fade with
        # time.
        h = self.implicit_filter(self.pos_emb.z[:, :length])
        h = self.modulation(self.pos_emb.t[:, :length], h)
        if self.normalized:
            norm = h.abs().sum(dim=-1, keepdim=True)
            h = h / torch.where(norm > 0, norm, 1)  # a tap that is zero in all channels stays zero
        return h[0].mT.reshape(*self.sizes, length)
