"""The Hyena of HyenaDNA in plain PyTorch (arXiv 2306.15794), with HyenaDNA's keys.

x_i and v have channels first: (batch, features, time).
"""

__all__ = ["HyenaDNABlock", "HyenaDNAMixer"]

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.activation import ACTIVATIONS
from torch_ref.layers.hyena import convolve_with_past
from torch_ref.layers.hyena_dna_filter import HyenaDNAFilter
from torch_ref.layers.state import State


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
        # Compute the filters, long enough for all inputs so far, and the weights of their skips.
        h = self.filter_fn(past[0].shape[-1] + u.shape[1])
        skip = self.filter_fn.bias.reshape(self.order - 1, self.features, 1)
        if not self.filter_bias:
            skip = torch.zeros_like(skip)
        # The short convolution continues from the last inputs.
        z = torch.cat([window, self.in_proj(u).mT], dim=-1)
        first, *x, v = self.short_filter(z).split(self.features, dim=1)
        # Gate v and convolve it, once for each gate from the last on. The first gate multiplies the
        # result.
        for n, x_n in enumerate(reversed(x)):
            v, past[n] = convolve_with_past(h[n], v * x_n, skip[n], past[n])
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
