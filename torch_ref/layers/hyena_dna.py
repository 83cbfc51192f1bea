"""The Hyena of HyenaDNA in plain PyTorch (arXiv 2306.15794), with HyenaDNA's keys.

x_i and v have channels first: (batch, features, time). `t` and `deltas` are buffers in HyenaDNA,
and parameters with requires_grad=False here.
"""

__all__ = ["HyenaDNABlock", "HyenaDNAFilter", "HyenaDNAMixer"]

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.activation import ACTIVATIONS
from torch_ref.layers.hyena import go_on
from torch_ref.layers.hyena_filter import Sin, check_length, decay_rates
from torch_ref.layers.state import State


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

    With `normalized`, the outputs of all filters at a step are divided by their L1 norm.
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
        h = self.implicit_filter(self.pos_emb.z[:, :length])
        if self.normalized:
            norm = h.abs().sum(dim=-1, keepdim=True)
            h = h / torch.where(norm > 0, norm, 1)  # a tap that is zero in all channels stays zero
        h = self.modulation(self.pos_emb.t[:, :length], h)
        return h[0].mT.reshape(*self.sizes, length)


class HyenaDNAMixer(nn.Module):
    """The Hyena operator with its products before the convolutions.

        x_0 … x_{N−1}, v = w ⋆ (A u + b) + c
        v ← h_n * (v ⊙ x_{N−n}) + B_n ⊙ v ⊙ x_{N−n}, for n = 1 … N − 1
        y = dropout(activation(v ⊙ x_0) W + b)

    If not filter_bias, B is treated as 0. u and y are (batch, time, features). The state holds the
    last values of A u + b, then all inputs of each convolution so far.
    """

    def __init__(
        self,
        features: int,
        max_length: int,
        *,
        order: int = 2,
        kernel_size: int = 3,
        dropout_rate: float = 0.0,
        embed_features: int = 5,
        mlp_features: int = 64,
        num_filter_layers: int = 4,
        omega: float = 10,
        shift: float = 0.05,
        modulate: bool = True,
        normalized: bool = False,
        filter_bias: bool = True,
        activation: str = "identity",
    ):
        super().__init__()
        width = features * (order + 1)
        self.features = features
        self.order = order
        self.in_proj = nn.Linear(features, width)
        self.kernel_size = kernel_size
        self.filter_bias = filter_bias
        self.activation = ACTIVATIONS[activation]
        self.short_filter = nn.Conv1d(width, width, kernel_size, groups=width)
        self.filter_fn = HyenaDNAFilter(
            features,
            max_length,
            order=order - 1,
            embed_features=embed_features,
            mlp_features=mlp_features,
            num_filter_layers=num_filter_layers,
            omega=omega,
            shift=shift,
            modulate=modulate,
            normalized=normalized,
            filter_bias=filter_bias,
        )
        self.out_proj = nn.Linear(features, features)
        self.dropout = nn.Dropout(dropout_rate)

    def forward(self, u: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        window, *past = self.init_state(u.shape[0]) if state is None else state
        h = self.filter_fn(past[0].shape[-1] + u.shape[1])
        skip = self.filter_fn.bias.reshape(self.order - 1, self.features, 1)
        if not self.filter_bias:
            skip = torch.zeros_like(skip)
        z = torch.cat([window, self.in_proj(u).mT], dim=-1)
        first, *x, v = self.short_filter(z).split(self.features, dim=1)
        for n, x_n in enumerate(reversed(x)):
            v, past[n] = go_on(h[n], v * x_n, skip[n], past[n])
        y = self.dropout(self.out_proj(self.activation(v * first).mT))
        return y, (z[..., u.shape[1] :], *past)

    def init_state(self, batch_size: int) -> State:
        window = self.in_proj.weight.new_zeros(
            batch_size, self.in_proj.out_features, self.kernel_size - 1
        )
        past = window.new_zeros(batch_size, self.features, 0)
        return window, *([past] * (self.order - 1))


class HyenaDNAMLP(nn.Module):
    """`gelu(x W_1 + b_1) W_2 + b_2`, with gelu approximated by tanh."""

    def __init__(self, features: int, mlp_features: int):
        super().__init__()
        self.fc1 = nn.Linear(features, mlp_features)
        self.fc2 = nn.Linear(mlp_features, features)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class HyenaDNABlock(nn.Module):
    """`x + mixer(norm1(x))`, then `x + mlp(norm2(x))`.

    The state is that of the mixer, to which all other options are passed.
    """

    def __init__(
        self,
        features: int,
        mlp_features: int,
        max_length: int,
        *,
        filter_features: int = 64,
        dropout_rate: float = 0.0,
        **mixer: Any,
    ):
        super().__init__()
        self.norm1 = nn.LayerNorm(features)
        self.mixer = HyenaDNAMixer(
            features,
            max_length,
            mlp_features=filter_features,
            dropout_rate=dropout_rate,
            **mixer,
        )
        self.norm2 = nn.LayerNorm(features)
        self.mlp = HyenaDNAMLP(features, mlp_features)
        self.dropout = nn.Dropout(dropout_rate)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        y, last = self.mixer(self.norm1(x), state)
        x = x + y
        return x + self.dropout(self.mlp(self.norm2(x))), last
