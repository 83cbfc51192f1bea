"""Mamba in plain PyTorch (arXiv 2312.00752), with the keys of transformers."""

__all__ = ["Mamba"]

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.state import State


class PlainRMSNorm(nn.Module):
    """`x / √(mean(x²) + ε)`, without a weight."""

    def __init__(self, epsilon: float):
        super().__init__()
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.epsilon)


class Mamba(nn.Module):
    """A state space whose step size and keys depend on x.

        u, z = x W_in + b_in                          side by side
        u = silu(conv(u))                             conv: short, causal, depthwise
        δ, B, C = norm(u W_x)                         side by side; each may have a norm
        Δ = softplus(δ W_Δ + b_Δ),   A = −exp(A_log)
        h ← exp(Δ A) ⊙ h + (Δ ⊙ u) Bᵀ,   o = h C + D ⊙ u
        y = (o ⊙ silu(z)) W_out + b_out

    x and y are (batch, time, features). The state is (the last kernel_size − 1 values of u before
    the convolution, h): (batch, inner, kernel_size − 1) and (batch, inner, state_features).
    """

    def __init__(
        self,
        features: int,
        *,
        inner_features: int | None = None,
        state_features: int = 16,
        dt_rank: int | None = None,
        kernel_size: int = 4,
        use_bias: bool = False,
        conv_bias: bool = True,
        norm: str | None = None,
        epsilon: float = 1e-6,
    ):
        super().__init__()
        inner, rank = inner_features or 2 * features, dt_rank or math.ceil(features / 16)
        self.sizes = [rank, state_features, state_features]
        self.in_proj = nn.Linear(features, 2 * inner, bias=use_bias)
        self.conv1d = nn.Conv1d(inner, inner, kernel_size, groups=inner, bias=conv_bias)
        self.x_proj = nn.Linear(inner, sum(self.sizes), bias=False)
        self.dt_layernorm, self.b_layernorm, self.c_layernorm = (
            self.norm_of(size, norm, epsilon) for size in self.sizes
        )
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.arange(1, state_features + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, features, bias=use_bias)

    @staticmethod
    def norm_of(size: int, norm: str | None, epsilon: float) -> nn.Module:
        """The norm of δ, B or C, which passes them unchanged if there is none."""
        if norm == "scaled":
            return nn.RMSNorm(size, eps=epsilon)
        return nn.Identity() if norm is None else PlainRMSNorm(epsilon)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        window, h = self.init_state(x.shape[0]) if state is None else state
        u, z = self.in_proj(x).chunk(2, dim=-1)
        # The short convolution.
        window = torch.cat([window.to(x.dtype), u.mT], dim=-1)
        groups, kernel = self.D.shape[0], self.conv1d
        u = F.silu(F.conv1d(window, kernel.weight, kernel.bias, groups=groups)).mT
        delta, B, C = self.x_proj(u).split(self.sizes, dim=-1)
        delta, B, C = self.dt_layernorm(delta), self.b_layernorm(B), self.c_layernorm(C)
        delta, A = F.softplus(self.dt_proj(delta)), -self.A_log.exp()

        # In each step, h decays and adds Δ u under the key B.
        outputs = []
        steps = (y.unbind(1) for y in (u, delta, B, C))
        for u_t, delta_t, B_t, C_t in zip(*steps, strict=True):
            h = torch.exp(delta_t[..., None] * A) * h
            h = h + (delta_t * u_t)[..., :, None] * B_t[..., None, :]
            outputs.append((h @ C_t[..., None])[..., 0] + self.D * u_t)
        y = torch.stack(outputs, dim=1) * F.silu(z)
        return self.out_proj(y), (window[..., x.shape[1] :], h)

    def init_state(self, batch_size: int) -> State:
        inner, _, kernel_size = self.conv1d.weight.shape
        window = self.A_log.new_zeros(batch_size, inner, kernel_size - 1)
        return window, self.A_log.new_zeros(batch_size, *self.A_log.shape)
