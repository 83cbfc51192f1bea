"""StripedHyena's Hyena block in plain PyTorch (arXiv 2310.18780), with the package's keys."""

__all__ = ["StripedHyenaBlock", "StripedHyenaMixer"]

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.activation import ACTIVATIONS
from torch_ref.layers.state import State


def as_complex(parts: Tensor) -> Tensor:
    """Joins real and imaginary parts along the last axis, in at least single precision."""
    parts = parts.to(torch.promote_types(parts.dtype, torch.float32))
    return torch.complex(parts[..., 0], parts[..., 1])


class StripedHyenaFilter(nn.Module):
    """A short convolution, and a long one with `h_t = Re Σ_n R_n λ_n^t`, computed as a recurrence.

        x_2, x_1, v = short_filter ⋆ z + bias
        s_t = λ ⊙ s_{t−1} + x_1 ⊙ v
        y_t = x_2 ⊙ (Re Σ_n R_n ⊙ s_{t,n} + D ⊙ x_1 ⊙ v)

    z is (batch, time, 3 · features), and y is (batch, time, features). The state holds the last
    kernel_size − 1 steps of z, (batch, 3 · features, kernel_size − 1), then the real and imaginary
    parts of s, (batch, features, state_size, 2).
    """

    def __init__(self, features: int, num_heads: int, state_size: int, kernel_size: int):
        super().__init__()
        self.num_heads = num_heads
        self.D = nn.Parameter(torch.randn(features))
        self.short_filter_weight = nn.Parameter(torch.randn(3 * features, 1, kernel_size))
        self.short_filter_bias = nn.Parameter(torch.randn(3 * features))
        angle = 2 * torch.pi * torch.rand(features, state_size, 1)
        circle = torch.stack([angle.cos(), angle.sin()], dim=-1)
        self.poles = nn.Parameter(circle * torch.empty_like(angle).uniform_(0.9, 0.999)[..., None])
        self.residues = nn.Parameter(torch.randn_like(circle) * state_size**-0.5)

    def forward(self, z: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        window, modes = self.init_state(z.shape[0]) if state is None else state
        # The short convolution, whose outputs are divided by head.
        window = torch.cat([window.to(z.dtype), z.mT], dim=-1)
        weight, bias = self.short_filter_weight, self.short_filter_bias
        z = F.conv1d(window, weight, bias, groups=len(bias)).mT
        by_head = z.unflatten(-1, (self.num_heads, 3, -1))
        x2, x1, v = (part.flatten(-2) for part in by_head.unbind(-2))
        x1v = x1 * v
        # The long convolution, one step after the other.
        poles, residues, s = (as_complex(x) for x in (self.poles, self.residues, modes))
        poles, residues = poles[..., 0], residues[..., 0]
        outputs = []
        for x1v_t in x1v.unbind(1):
            s = poles * s + x1v_t[..., None]
            outputs.append((residues * s).real.sum(-1) + self.D * x1v_t)
        y = torch.stack(outputs, dim=1).to(z.dtype) * x2
        past = window.shape[-1] - (weight.shape[-1] - 1)
        return y, (window[..., past:], torch.view_as_real(s))

    def init_state(self, batch_size: int) -> State:
        weight, poles = self.short_filter_weight, self.poles
        modes = poles.new_zeros(batch_size, *poles.shape[:2], 2)
        return weight.new_zeros(batch_size, len(weight), weight.shape[-1] - 1), modes


class StripedHyenaMixer(nn.Module):
    """`y = filter(u A + b) W + c`; the state is that of `filter`."""

    def __init__(
        self, features: int, *, num_heads: int = 1, state_size: int = 8, kernel_size: int = 3
    ):
        super().__init__()
        self.projections = nn.Linear(features, 3 * features)
        self.filter = StripedHyenaFilter(features, num_heads, state_size, kernel_size)
        self.out_filter_dense = nn.Linear(features, features)

    def forward(self, u: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        y, last = self.filter(self.projections(u), state)
        return self.out_filter_dense(y), last


class StripedHyenaNorm(nn.Module):
    """`x / (√mean(x²) + ε) · scale` over the features."""

    def __init__(self, features: int, epsilon: float):
        super().__init__()
        self.epsilon = epsilon
        self.scale = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        root = x.norm(dim=-1, keepdim=True) * x.shape[-1] ** -0.5
        return self.scale * (x / (root + self.epsilon))


class StripedHyenaMLP(nn.Module):
    """`(silu(x W_1) ⊙ x W_2) W_3`, with silu or another `activation`."""

    def __init__(self, features: int, mlp_features: int, activation: str):
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.l1 = nn.Linear(features, mlp_features, bias=False)
        self.l2 = nn.Linear(features, mlp_features, bias=False)
        self.l3 = nn.Linear(mlp_features, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.l3(self.activation(self.l1(x)) * self.l2(x))


class StripedHyenaBlock(StripedHyenaMixer):
    """`x ← x + mixer(norm(x))`, then `x ← x + mlp(norm(x))`; the state is that of the mixer."""

    def __init__(
        self,
        features: int,
        mlp_features: int,
        *,
        num_heads: int = 1,
        state_size: int = 8,
        kernel_size: int = 3,
        activation: str = "silu",
        epsilon: float = 1e-5,
    ):
        super().__init__(
            features, num_heads=num_heads, state_size=state_size, kernel_size=kernel_size
        )
        self.pre_norm = StripedHyenaNorm(features, epsilon)
        self.post_norm = StripedHyenaNorm(features, epsilon)
        self.mlp = StripedHyenaMLP(features, mlp_features, activation)

    def forward(self, u: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        y, last = super().forward(self.pre_norm(u), state)
        u = u + y
        return u + self.mlp(self.post_norm(u)), last
