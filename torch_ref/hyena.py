"""Hyena in plain PyTorch (seed 002, the Annotated Hyena; arXiv 2302.10866), under the seed's keys.

h, x_i and v are channels first, as (batch, features, time), or (order, features, time) for the
filters. The constants `t`, `time_emb` and `freq` are parameters, for they are in the state_dict;
they and those parameters that have no part in the output have requires_grad=False, so that a
weight-decaying optimiser leaves them alone.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def decay_rates(features: int) -> Tensor:
    """α (1, features, 1): e^{αt} falls to 0.01 at t = 1.5 (slowest channel) down to 0.3."""
    return torch.linspace(math.log(0.01) / 1.5, math.log(0.01) / 0.3, features)[None, :, None]


def unit_time(max_length: int) -> Tensor:
    """T (1, 1, max_length): from 0 to 1."""
    return torch.linspace(0, 1, max_length)[None, None, :]


def check_length(length: int, max_length: int) -> None:
    if length > max_length:
        raise ValueError(f"length: expected at most {max_length} steps, got {length}")


def fft_conv(h: Tensor, v: Tensor, skip: Tensor) -> Tensor:
    """`y_t = Σ_{s≤t} h_{t−s} v_s + v_t ⊙ skip`, by the convolution theorem.

    L zeros at the end keep the circular convolution of the FFT from wrapping round. There is no
    FFT of half-precision numbers: they are transformed in float32. The dtype is that of h.
    """
    L = v.shape[-1]
    dtype = torch.promote_types(h.dtype, torch.float32)
    product = torch.fft.rfft(h[..., :L].to(dtype), n=2 * L) * torch.fft.rfft(v.to(dtype), n=2 * L)
    return (torch.fft.irfft(product, n=2 * L)[..., :L] + v * skip).to(h.dtype)


class Projection(nn.Module):
    """`x_1 … x_N, v = w ⋆ (A u + b) + c`: a Linear, then a causal convolution of each channel.

    u is (batch, time, features), the outputs are (batch, features, time).
    """

    def __init__(self, features: int, order: int, kernel_size: int):
        super().__init__()
        width = features * (order + 1)
        self.features = features
        self.kernel_size = kernel_size
        self.linear = nn.Linear(features, width)
        self.conv = nn.Conv1d(width, width, kernel_size, groups=width)

    def forward(self, u: Tensor) -> tuple[Tensor, ...]:
        z = F.pad(self.linear(u).mT, (self.kernel_size - 1, 0))
        return self.conv(z).split(self.features, dim=1)


class Window(nn.Module):
    """`h ⊙ (e^{αt} + b)`, with a trainable decay α and shift b in each channel."""

    def __init__(self, features: int, max_length: int):
        super().__init__()
        self.b = nn.Parameter(torch.zeros(1, features, 1))
        self.alphas = nn.Parameter(decay_rates(features))
        self.t = nn.Parameter(unit_time(max_length), requires_grad=False)

    def forward(self, h: Tensor) -> Tensor:
        return h * (torch.exp(self.alphas * self.t[..., : h.shape[-1]]) + self.b)


class HyenaFilter(nn.Module):
    """The windowed h, over its L1 norm: `filter(L)` is (order, features, L).

    The norm is over the channels, as in the seed's code (its text says over time).
    """

    def __init__(self, features: int, order: int, max_length: int):
        super().__init__()
        self.max_length = max_length
        self.h = nn.Parameter(torch.randn(order, features, max_length))
        self.window = Window(features, max_length)

    def forward(self, length: int) -> Tensor:
        check_length(length, self.max_length)
        h = self.window(self.h[..., :length])
        return h / h.abs().sum(dim=-2, keepdim=True)


class HyenaBlock(nn.Module):
    """The seed's Hyena operator, with three skip connections and normalised x_i.

        x_1 … x_N, v = projection(u)
        v ← v + u
        v ← v + x_i / |x_i| ⊙ (h_i * v + B_i ⊙ v), for each i
        y = v + dropout(v W + b)

    |x_i| is over the channels. u and y are (batch, time, features). The seed declares the dropout
    and never applies it.
    """

    def __init__(
        self,
        features: int,
        max_length: int,
        order: int = 2,
        kernel_size: int = 3,
        dropout_rate: float = 0.0,
    ):
        super().__init__()
        self.proj_input = Projection(features, order, kernel_size)
        self.proj_output = nn.Linear(features, features)
        self.filter = HyenaFilter(features, order, max_length)
        self.dropout = nn.Dropout(dropout_rate)
        self.B = nn.Parameter(torch.randn(order, 1, features, 1))

    def forward(self, u: Tensor) -> Tensor:
        h = self.filter(u.shape[1])
        *x, v = self.proj_input(u)
        v = v + u.mT
        for h_i, x_i, B_i in zip(h, x, self.B, strict=True):
            v = v + F.normalize(x_i, dim=1) * fft_conv(h_i, v, B_i)
        v = v.mT
        return v + self.dropout(self.proj_output(v))


class PositionalEmbedding(nn.Module):
    """Trainable rows that start as `[t/(L−1), cos(2πkt/L) …, sin(2πkt/L) …]`, k = 0 … K−1.

    L is max_length and embed_features 2K + 1.
    """

    def __init__(self, embed_features: int, max_length: int):
        if embed_features < 3 or embed_features % 2 == 0:
            raise ValueError(
                f"embed_features: expected an odd number of at least 3, got {embed_features}"
            )
        super().__init__()
        t = unit_time(max_length)
        angle = 2 * math.pi * torch.arange(max_length)[:, None] / max_length
        angle = angle * torch.arange((embed_features - 1) // 2)
        self.time_emb = nn.Parameter(t, requires_grad=False)
        self.pos_emb = nn.Parameter(torch.cat([t[0].mT, angle.cos(), angle.sin()], dim=-1))

    def forward(self, length: int) -> Tensor:
        return self.pos_emb[:length]


class Sin(nn.Module):
    """`sin(ω x)`, with ω fixed."""

    def __init__(self, features: int, omega: float):
        super().__init__()
        self.freq = nn.Parameter(torch.full((1, features), float(omega)), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.freq * x)


class AuthenticWindow(nn.Module):
    """`h ⊙ (e^{αt} + shift)`: the shift is no parameter."""

    def __init__(self, features: int, shift: float = 0.0):
        super().__init__()
        self.shift = shift
        self.alphas = nn.Parameter(decay_rates(features))

    def forward(self, t: Tensor, h: Tensor) -> Tensor:
        return h * (torch.exp(self.alphas * t[..., : h.shape[-1]]) + self.shift)


class AuthenticHyenaFilter(nn.Module):
    """The filter of the paper: `filter(L)` is (order, features, L).

    implicit: h = window(MLP(positional embedding)), with sines between the layers, as the seed's
    text has it. Otherwise h = window(h), explicit, as the seed's code has it, which discards the
    output of its MLP. The parameters of both are there under the seed's keys.
    """

    def __init__(
        self,
        features: int,
        order: int,
        max_length: int,
        embed_features: int = 33,
        mlp_features: int = 64,
        num_filter_layers: int = 4,
        omega: float = 12,
        implicit: bool = False,
    ):
        if num_filter_layers < 2:
            raise ValueError(f"num_filter_layers: expected at least 2, got {num_filter_layers}")
        super().__init__()
        self.max_length = max_length
        self.implicit = implicit
        self.pos_emb = PositionalEmbedding(embed_features, max_length)
        self.mlp = nn.Sequential(nn.Linear(embed_features, mlp_features), Sin(mlp_features, omega))
        for _ in range(num_filter_layers - 2):
            self.mlp.append(nn.Linear(mlp_features, mlp_features))
            self.mlp.append(Sin(mlp_features, omega))
        self.mlp.append(nn.Linear(mlp_features, order * features, bias=False))
        self.t = nn.Parameter(unit_time(max_length), requires_grad=False)
        self.h = nn.Parameter(torch.randn(order, features, max_length))
        self.window = AuthenticWindow(features)
        unused = [self.h] if implicit else [*self.pos_emb.parameters(), *self.mlp.parameters()]
        for parameter in unused:
            parameter.requires_grad = False

    def forward(self, length: int) -> Tensor:
        check_length(length, self.max_length)
        h = self.h[..., :length]
        if self.implicit:
            h = self.mlp(self.pos_emb(length)).mT.reshape(h.shape)
        return self.window(self.t, h)


class AuthenticHyenaBlock(nn.Module):
    """The Hyena operator of the paper's equation (6): no skips, no normalisation.

        x_1 … x_N, v = projection(u)
        v ← x_i ⊙ (h_i * v + B_i ⊙ v), for each i
        y = dropout(v W + b)

    u and y are (batch, time, features). The seed declares the dropout and never applies it.
    """

    def __init__(
        self,
        features: int,
        max_length: int,
        order: int = 2,
        kernel_size: int = 3,
        dropout_rate: float = 0.0,
        embed_features: int = 33,
        mlp_features: int = 64,
        num_filter_layers: int = 4,
        omega: float = 12,
        implicit: bool = False,
    ):
        super().__init__()
        self.proj_input = Projection(features, order, kernel_size)
        self.proj_output = nn.Linear(features, features)
        self.filter = AuthenticHyenaFilter(
            features,
            order,
            max_length,
            embed_features,
            mlp_features,
            num_filter_layers,
            omega,
            implicit,
        )
        self.dropout = nn.Dropout(dropout_rate)
        self.B = nn.Parameter(torch.randn(order, 1, features, 1))

    def forward(self, u: Tensor) -> Tensor:
        h = self.filter(u.shape[1])
        *x, v = self.proj_input(u)
        for h_i, x_i, B_i in zip(h, x, self.B, strict=True):
            v = x_i * fft_conv(h_i, v, B_i)
        return self.dropout(self.proj_output(v.mT))
