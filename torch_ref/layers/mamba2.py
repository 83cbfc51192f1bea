"""Mamba-2 in plain PyTorch (arXiv 2405.21060), with the keys of transformers."""

__all__ = ["Mamba2"]

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.state import State


class GroupedRMSNorm(nn.Module):
    """`x / √(mean(x²) + ε) · weight`, with the mean of each group of consecutive features."""

    def __init__(self, features: int, num_groups: int, epsilon: float):
        super().__init__()
        self.num_groups, self.epsilon = num_groups, epsilon
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (self.num_groups, -1))
        return F.rms_norm(groups, groups.shape[-1:], eps=self.epsilon).flatten(-2) * self.weight


class Mamba2(nn.Module):
    """A state space whose decay and inputs depend on x.

        z, u, B, C, dt = x W_in + b_in                            side by side
        u, B, C = silu(conv(u)), silu(conv(B)), silu(conv(C))     conv: short, causal, depthwise
        Δ = clip(softplus(dt + dt_bias)),   α = exp(−exp(A_log) ⊙ Δ)
        S ← α S + Δ u Bᵀ,   o = S C + D ⊙ u                       by head
        y = norm(o ⊙ silu(z)) W_out + b_out                       norm: RMSNorm of each group

    Each group of B and C serves num_heads / num_groups consecutive heads. x and y are (batch, time,
    features). The state is (the last kernel_size − 1 values of u, B and C before the convolution,
    S): (batch, channels, kernel_size − 1) and (batch, num_heads, head_features, state_features).
    """

    def __init__(
        self,
        features: int,
        *,
        num_heads: int,
        head_features: int = 64,
        state_features: int = 128,
        num_groups: int = 1,
        kernel_size: int = 4,
        use_bias: bool = False,
        out_bias: bool | None = None,
        conv_bias: bool = True,
        dt_limits: tuple[float, float] = (0.0, math.inf),
        use_norm: bool = True,
        norm_before_gate: bool = False,
        epsilon: float = 1e-5,
    ):
        super().__init__()
        self.heads, self.groups, self.state_features = num_heads, num_groups, state_features
        self.dt_limits, self.norm_before_gate = dt_limits, norm_before_gate
        inner, group = num_heads * head_features, num_groups * state_features
        self.sizes = [inner, group, group]
        channels = sum(self.sizes)
        self.in_proj = nn.Linear(features, inner + channels + num_heads, bias=use_bias)
        self.conv1d = nn.Conv1d(channels, channels, kernel_size, groups=channels, bias=conv_bias)
        self.dt_bias = nn.Parameter(torch.ones(num_heads))
        self.A_log = nn.Parameter(torch.arange(1, num_heads + 1).log())
        self.D = nn.Parameter(torch.ones(num_heads))
        self.norm = GroupedRMSNorm(inner, num_groups, epsilon) if use_norm else nn.Identity()
        self.out_proj = nn.Linear(inner, features, bias=use_bias if out_bias is None else out_bias)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        window, s = self.init_state(x.shape[0]) if state is None else state
        inner, channels = self.sizes[0], sum(self.sizes)
        z, uBC, dt = self.project(x).split([inner, channels, self.heads], dim=-1)
        # The short convolution.
        window = torch.cat([window.to(x.dtype), uBC.mT], dim=-1)
        convolved = F.conv1d(window, self.conv1d.weight, self.conv1d.bias, groups=channels)
        u, B, C = F.silu(convolved).mT.split(self.sizes, dim=-1)
        u = u.unflatten(-1, (self.heads, -1))
        B, C = (
            y.unflatten(-1, (self.groups, -1)).repeat_interleave(self.heads // self.groups, dim=2)
            for y in (B, C)
        )
        delta = F.softplus(dt + self.dt_bias).clip(*self.dt_limits)
        alpha = torch.exp(-self.A_log.exp() * delta)

        # In each step, S decays and adds Δ u under the key B.
        outputs = []
        steps = (y.unbind(1) for y in (u, B, C, delta[..., None], alpha[..., None, None]))
        for u_t, B_t, C_t, delta_t, alpha_t in zip(*steps, strict=True):
            s = alpha_t * s + (delta_t * u_t)[..., :, None] * B_t[..., None, :]
            outputs.append((s @ C_t[..., None])[..., 0] + self.D[:, None] * u_t)
        o, gate = torch.stack(outputs, dim=1).flatten(-2), F.silu(z)
        y = self.norm(o) * gate if self.norm_before_gate else self.norm(o * gate)
        return self.out_proj(y), (window[..., x.shape[1] :], s)

    def project(self, x: Tensor) -> Tensor:
        """z, u, B, C and dt, side by side."""
        return self.in_proj(x)

    def init_state(self, batch_size: int) -> State:
        channels, _, kernel_size = self.conv1d.weight.shape
        window = self.A_log.new_zeros(batch_size, channels, kernel_size - 1)
        head_features = self.sizes[0] // self.heads
        return window, self.A_log.new_zeros(
            batch_size, self.heads, head_features, self.state_features
        )
