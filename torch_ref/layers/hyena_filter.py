"""The filters of Hyena in plain PyTorch (arXiv 2302.10866), with the keys of The Annotated Hyena.

A filter is (order, features, time). The constants `t`, `time_emb` and `freq` are parameters,
because they are in the state_dict. They have requires_grad=False, and so do parameters that do not
affect the output, so that an optimizer with weight decay does not change them.
"""

__all__ = [
    "AuthenticHyenaFilter",
    "AuthenticWindow",
    "HyenaFilter",
    "PositionalEmbedding",
    "Sin",
    "Window",
]

import math

import torch
from torch import Tensor, nn


def decay_rates(features: int) -> Tensor:
    """α (1, features, 1): e^{αt} decays to 0.01 at t = 1.5 (slowest channel) to 0.3 (fastest)."""
    return torch.linspace(math.log(0.01) / 1.5, math.log(0.01) / 0.3, features)[None, :, None]


def unit_time(max_length: int) -> Tensor:
    """Times from 0 to 1, (1, 1, max_length)."""
    return torch.linspace(0, 1, max_length)[None, None, :]


def check_length(length: int, max_length: int) -> None:
    if length > max_length:
        raise ValueError(f"length: expected at most {max_length} steps, got {length}")


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
    """`filter(L)` is (order, features, L): the windowed h, divided by its L1 norm.

    The norm is over the channels, as in the code of The Annotated Hyena. Its text says that the
    norm is over time.
    """

    def __init__(self, features: int, max_length: int, *, order: int = 2):
        super().__init__()
        self.max_length = max_length
        self.h = nn.Parameter(torch.randn(order, features, max_length))
        self.window = Window(features, max_length)

    def forward(self, length: int) -> Tensor:
        check_length(length, self.max_length)
        h = self.window(self.h[..., :length])
        norm = h.abs().sum(dim=-2, keepdim=True)
        return h / torch.where(norm > 0, norm, 1)  # a tap that is zero in all channels stays zero


class PositionalEmbedding(nn.Module):
    """Trained rows, initially `[t/(L−1), cos(2πkt/L) …, sin(2πkt/L) …]` with k = 0 … K−1.

    L is max_length, and embed_features is 2K + 1.
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
    """`h ⊙ (e^{αt} + shift)`, where the shift is not a parameter."""

    def __init__(self, features: int, shift: float = 0.0):
        super().__init__()
        self.shift = shift
        self.alphas = nn.Parameter(decay_rates(features))

    def forward(self, t: Tensor, h: Tensor) -> Tensor:
        return h * (torch.exp(self.alphas * t[..., : h.shape[-1]]) + self.shift)


class AuthenticHyenaFilter(nn.Module):
    """The filter of the paper: `filter(L)` is (order, features, L).

    If `implicit`, h = window(MLP(positional embedding)), with sines between the layers, as the text
    of The Annotated Hyena describes. Otherwise h = window(h), where h is a parameter, as in its
    code, which discards the output of the MLP. The module always has the parameters of both.
    """

    def __init__(
        self,
        features: int,
        max_length: int,
        *,
        order: int = 2,
        embed_features: int = 33,
        mlp_features: int = 64,
        num_filter_layers: int = 4,
        omega: float = 12,
        implicit: bool = True,
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
        # Train either the network or the taps. The module keeps both, as in the published code.
        unused = [self.h] if implicit else [*self.pos_emb.parameters(), *self.mlp.parameters()]
        for parameter in unused:
            parameter.requires_grad = False

    def forward(self, length: int) -> Tensor:
        check_length(length, self.max_length)
        h = self.h[..., :length]
        if self.implicit:
            h = self.mlp(self.pos_emb(length)).mT.reshape(h.shape)
        return self.window(self.t, h)
