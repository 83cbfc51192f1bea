"""Hyena in plain PyTorch (arXiv 2302.10866), with the keys of The Annotated Hyena.

x_i and v have channels first: (batch, features, time).
"""

__all__ = ["AuthenticHyenaBlock", "HyenaBlock", "Projection"]

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.hyena_filter import AuthenticHyenaFilter, HyenaFilter
from torch_ref.layers.state import State


def fft_conv(h: Tensor, v: Tensor, skip: Tensor) -> Tensor:
    """`y_t = Σ_{s≤t} h_{t−s} v_s + v_t ⊙ skip`, computed by FFT.

    L zeros at the end keep the circular convolution of the FFT from wrapping around. Half-precision
    inputs are transformed in float32, because there is no half-precision FFT. The result has the
    dtype of h.
    """
    L = v.shape[-1]
    dtype = torch.promote_types(h.dtype, torch.float32)
    product = torch.fft.rfft(h[..., :L].to(dtype), n=2 * L) * torch.fft.rfft(v.to(dtype), n=2 * L)
    return (torch.fft.irfft(product, n=2 * L)[..., :L] + v * skip).to(h.dtype)


def convolve_with_past(h: Tensor, v: Tensor, skip: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """Continues a convolution of `past` with v: returns the new outputs, and all inputs so far."""
    inputs = torch.cat([past, v], dim=-1)
    return fft_conv(h, inputs, skip)[..., past.shape[-1] :], inputs


class Projection(nn.Module):
    """`x_1 … x_N, v = w ⋆ (A u + b) + c`: a Linear, then a causal depthwise convolution.

    u is (batch, time, features), and the outputs are (batch, features, time). The state holds the
    last kernel_size − 1 outputs of the Linear, (batch, features · (N + 1), kernel_size − 1).
    """

    def __init__(self, features: int, order: int, kernel_size: int):
        super().__init__()
        width = features * (order + 1)
        self.features = features
        self.kernel_size = kernel_size
        self.linear = nn.Linear(features, width)
        self.conv = nn.Conv1d(width, width, kernel_size, groups=width)

    def forward(self, u: Tensor, state: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        z = torch.cat([state, self.linear(u).mT], dim=-1)
        return self.conv(z).split(self.features, dim=1), z[..., u.shape[1] :]

    def init_state(self, batch_size: int) -> Tensor:
        width = self.linear.out_features
        return self.conv.weight.new_zeros(batch_size, width, self.kernel_size - 1)


class HyenaBlock(nn.Module):
    """The Annotated Hyena's operator, with three skip connections and normalized x_i.

        x_1 … x_N, v = projection(u)
        v ← v + u
        v ← v + x_i / |x_i| ⊙ (h_i * v + B_i ⊙ v), for each i
        y = v + dropout(v W + b)

    |x_i| is the norm over the channels. u and y are (batch, time, features). The state is that of
    the projection, then all inputs v of each convolution so far. The Annotated Hyena declares the
    dropout but never applies it.
    """

    def __init__(
        self,
        features: int,
        max_length: int,
        *,
        order: int = 2,
        kernel_size: int = 3,
        dropout_rate: float = 0.0,
    ):
        super().__init__()
        self.proj_input = Projection(features, order, kernel_size)
        self.proj_output = nn.Linear(features, features)
        self.filter = HyenaFilter(features, max_length, order=order)
        self.dropout = nn.Dropout(dropout_rate)
        self.B = nn.Parameter(torch.randn(order, 1, features, 1))

    def forward(self, u: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        window, *past = init_state(self, u.shape[0]) if state is None else state
        # Compute the filters, long enough for all inputs so far.
        h = self.filter(past[0].shape[-1] + u.shape[1])
        # Project to the gates x and to v, with the first skip connection.
        (*x, v), window = self.proj_input(u, window)
        v = v + u.mT
        # Convolve v with each filter in turn, and gate the result.
        for i, (h_i, x_i, B_i) in enumerate(zip(h, x, self.B, strict=True)):
            convolved, past[i] = convolve_with_past(h_i, v, B_i, past[i])
            v = v + F.normalize(x_i, dim=1) * convolved
        v = v.mT
        return v + self.dropout(self.proj_output(v)), (window, *past)


class AuthenticHyenaBlock(nn.Module):
    """The Hyena operator of the paper's equation (6): no skips, no normalization.

        x_1 … x_N, v = projection(u)
        v ← x_i ⊙ (h_i * v + B_i ⊙ v), for each i
        y = dropout(v W + b)

    u and y are (batch, time, features), and the state is that of `HyenaBlock`. The Annotated Hyena
    declares the dropout but never applies it.
    """

    def __init__(
        self,
        features: int,
        max_length: int,
        *,
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
            max_length,
            order=order,
            embed_features=embed_features,
            mlp_features=mlp_features,
            num_filter_layers=num_filter_layers,
            omega=omega,
            implicit=implicit,
        )
        self.dropout = nn.Dropout(dropout_rate)
        self.B = nn.Parameter(torch.randn(order, 1, features, 1))

    def forward(self, u: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        window, *past = init_state(self, u.shape[0]) if state is None else state
        # Compute the filters, long enough for all inputs so far.
        h = self.filter(past[0].shape[-1] + u.shape[1])
        (*x, v), window = self.proj_input(u, window)
        # Convolve v with each filter in turn, and gate the result.
        for i, (h_i, x_i, B_i) in enumerate(zip(h, x, self.B, strict=True)):
            convolved, past[i] = convolve_with_past(h_i, v, B_i, past[i])
            v = x_i * convolved
        return self.dropout(self.proj_output(v.mT)), (window, *past)


def init_state(block: HyenaBlock | AuthenticHyenaBlock, batch_size: int) -> State:
    """The state of a Hyena block before the first step."""
    order, _, features, _ = block.B.shape
    past = block.B.new_zeros(batch_size, features, 0)
    return block.proj_input.init_state(batch_size), *([past] * order)
