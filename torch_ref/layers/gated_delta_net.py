"""Gated DeltaNet in plain PyTorch (arXiv 2412.06464), with the keys of three models."""

__all__ = ["GatedDeltaNet", "OLMoHybridGatedDeltaNet", "Qwen3NextGatedDeltaNet"]

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.state import State


def l2_normalize(x: Tensor) -> Tensor:
    """`x / √(Σ x² + 1e-6)` over the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class GatedDeltaNet(nn.Module):
    """The mixer of Qwen3.5, which keeps a matrix for each head.

        q, k, v, z, b, a = projections of x, without biases
        q, k, v = silu(conv(q)), silu(conv(k)), silu(conv(v))     conv: short, causal, depthwise
        q, k = q / (‖q‖ √key_features), k / ‖k‖                   by head
        α = exp(−exp(A_log) ⊙ softplus(a + dt_bias)),   β = σ(b), or 2 σ(b)
        S ← α S,   S ← S + β (v − S k) kᵀ,   o = S q              by head of v
        y = (norm(o) ⊙ silu(z)) W_out                             norm: RMSNorm of each head

    Each key head serves num_value_heads / num_key_heads consecutive value heads. x and y are
    (batch, time, features). The state is (the last kernel_size − 1 values of q, k and v before the
    convolution, S): (batch, channels, kernel_size − 1) and (batch, value heads, value, key).
    """

    def __init__(
        self,
        features: int,
        *,
        num_key_heads: int,
        num_value_heads: int,
        key_features: int,
        value_features: int,
        kernel_size: int = 4,
        negative_eigenvalues: bool = False,
        epsilon: float = 1e-6,
    ):
        super().__init__()
        self.key_heads, self.heads = num_key_heads, num_value_heads
        self.key_features, self.value_features = key_features, value_features
        keys, values = num_key_heads * key_features, num_value_heads * value_features
        self.sizes = [keys, keys, values]
        self.greatest_rate = 2 if negative_eigenvalues else 1
        channels = sum(self.sizes)
        self.conv1d = nn.Conv1d(channels, channels, kernel_size, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(num_value_heads).uniform_(0.01, 16).log())
        self.dt_bias = nn.Parameter(torch.ones(num_value_heads))
        self.add_projections(features, epsilon)

    def add_projections(self, features: int, epsilon: float) -> None:
        self.in_proj_qkv = nn.Linear(features, sum(self.sizes), bias=False)
        self.in_proj_z = nn.Linear(features, self.sizes[2], bias=False)
        self.in_proj_b = nn.Linear(features, self.heads, bias=False)
        self.in_proj_a = nn.Linear(features, self.heads, bias=False)
        self.norm = nn.RMSNorm(self.value_features, eps=epsilon)
        self.out_proj = nn.Linear(self.sizes[2], features, bias=False)

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns q, k and v side by side, and z, b and a."""
        return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)

    def output(self, o: Tensor, z: Tensor) -> Tensor:
        return self.out_proj((self.norm(o) * F.silu(z)).flatten(-2))

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        window, s = self.init_state(x.shape[0]) if state is None else state
        qkv, z, b, a = self.projected(x)
        # The short convolution.
        window = torch.cat([window.to(x.dtype), qkv.mT], dim=-1)
        convolved = F.conv1d(window, self.conv1d.weight, groups=sum(self.sizes))
        q, k, v = F.silu(convolved).mT.split(self.sizes, dim=-1)
        q, k = (y.unflatten(-1, (self.key_heads, self.key_features)) for y in (q, k))
        v, z = (y.unflatten(-1, (self.heads, self.value_features)) for y in (v, z))
        # The queries and keys of each value head, its decay and its rate.
        q, k = l2_normalize(q) * self.key_features**-0.5, l2_normalize(k)
        q, k = (y.repeat_interleave(self.heads // self.key_heads, dim=2) for y in (q, k))
        alpha = torch.exp(-self.A_log.exp() * F.softplus(a + self.dt_bias))
        beta = self.greatest_rate * torch.sigmoid(b)

        # In each step, S decays, and the value under the key moves toward v.
        outputs = []
        steps = (y.unbind(1) for y in (q, k, v, alpha[..., None, None], beta[..., None]))
        for q_t, k_t, v_t, alpha_t, beta_t in zip(*steps, strict=True):
            s = alpha_t * s
            error = beta_t * (v_t - (s @ k_t[..., None])[..., 0])
            s = s + error[..., :, None] * k_t[..., None, :]
            outputs.append((s @ q_t[..., None])[..., 0])
        y = self.output(torch.stack(outputs, dim=1), z)
        return y, (window[..., x.shape[1] :], s)

    def init_state(self, batch_size: int) -> State:
        channels, _, kernel_size = self.conv1d.weight.shape
        window = self.A_log.new_zeros(batch_size, channels, kernel_size - 1)
        sizes = self.heads, self.value_features, self.key_features
        return window, self.A_log.new_zeros(batch_size, *sizes)


class OLMoHybridGatedDeltaNet(GatedDeltaNet):
    """The mixer of OLMo Hybrid: the same equations under other keys."""

    def add_projections(self, features: int, epsilon: float) -> None:
        keys, _, values = self.sizes
        self.q_proj = nn.Linear(features, keys, bias=False)
        self.k_proj = nn.Linear(features, keys, bias=False)
        self.v_proj = nn.Linear(features, values, bias=False)
        self.g_proj = nn.Linear(features, values, bias=False)
        self.b_proj = nn.Linear(features, self.heads, bias=False)
        self.a_proj = nn.Linear(features, self.heads, bias=False)
        self.o_norm = nn.RMSNorm(self.value_features, eps=epsilon)
        self.o_proj = nn.Linear(values, features, bias=False)

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        return qkv, self.g_proj(x), self.b_proj(x), self.a_proj(x)

    def output(self, o: Tensor, z: Tensor) -> Tensor:
        return self.o_proj((self.o_norm(o) * F.silu(z)).flatten(-2))


class Qwen3NextGatedDeltaNet(GatedDeltaNet):
    """The mixer of Qwen3-Next, whose projections have q, k, v and z of a key head together.

    For each key head, `in_proj_qkvz` gives its q and k, then v and z of the value heads that it
    serves, and `in_proj_ba` gives b and a of these heads.
    """

    def add_projections(self, features: int, epsilon: float) -> None:
        keys, _, values = self.sizes
        self.in_proj_qkvz = nn.Linear(features, 2 * keys + 2 * values, bias=False)
        self.in_proj_ba = nn.Linear(features, 2 * self.heads, bias=False)
        self.norm = nn.RMSNorm(self.value_features, eps=epsilon)
        self.out_proj = nn.Linear(values, features, bias=False)

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        served = self.heads // self.key_heads
        keys, values = self.key_features, served * self.value_features
        by_head = self.in_proj_qkvz(x).unflatten(-1, (self.key_heads, -1))
        *qkv, z = (y.flatten(-2) for y in by_head.split([keys, keys, values, values], dim=-1))
        b, a = self.in_proj_ba(x).unflatten(-1, (self.key_heads, -1)).chunk(2, dim=-1)
        return torch.cat(qkv, dim=-1), z, b.flatten(-2), a.flatten(-2)
