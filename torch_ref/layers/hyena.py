"""Hyena in plain PyTorch (seed 002, the Annotated Hyena; arXiv 2302.10866), under the seed's keys.

x_i and v are channels first, (batch, features, time).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.hyena_filter import AuthenticHyenaFilter, HyenaFilter


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
        implicit: bool = True,
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
