"""Kimi Delta Attention in plain PyTorch (arXiv 2510.26692), with the keys of transformers."""

__all__ = ["KimiDeltaAttention"]

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.gated_delta_net import l2_normalize
from torch_ref.layers.state import State


class ForgetGate(nn.Module):
    """The logarithm of the decay of each feature of each head.

        f = W_f x + dt_bias
        log α = −exp(A_log) ⊙ softplus(f), or min_log_decay · σ(exp(A_log) ⊙ f)

    With `low_rank`, W_f is f_b_proj(f_a_proj(x)), and A_log is (1, 1, heads, 1).
    """

    def __init__(
        self, features: int, heads: int, size: int, low_rank: bool, min_log_decay: float | None
    ):
        super().__init__()
        self.heads, self.low_rank, self.min_log_decay = heads, low_rank, min_log_decay
        A_log = torch.empty(heads).uniform_(1, 16).log()
        self.A_log = nn.Parameter(A_log.reshape(1, 1, heads, 1) if low_rank else A_log)
        self.dt_bias = nn.Parameter(torch.ones(heads * size))
        if low_rank:
            self.f_a_proj = nn.Linear(features, size, bias=False)
            self.f_b_proj = nn.Linear(size, heads * size, bias=False)
        else:
            self.f_proj = nn.Linear(features, heads * size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        f = self.f_b_proj(self.f_a_proj(x)) if self.low_rank else self.f_proj(x)
        f = (f + self.dt_bias).unflatten(-1, (self.heads, -1))
        rate = self.A_log.exp().reshape(self.heads, 1)
        if self.min_log_decay is None:
            return -rate * F.softplus(f)
        return self.min_log_decay * torch.sigmoid(rate * f)


class KimiDeltaAttention(nn.Module):
    """The mixer of Kimi Linear and, without `low_rank`, that of Ling 3.

        q, k, v, b = projections of x, without biases
        q, k, v = silu(conv(q)), silu(conv(k)), silu(conv(v))     conv: short, causal, depthwise
        q, k = q / (‖q‖ √head_features), k / ‖k‖                  by head
        α = exp(ForgetGate(x)),   β = σ(b)                        α: by feature of k
        S ← S diag(α),   S ← S + β (v − S k) kᵀ,   o = S q        by head
        y = (norm(o) ⊙ σ(W_g x)) W_o                              norm: RMSNorm of each head

    With `low_rank`, W_g is g_b_proj(g_a_proj(x)). x and y are (batch, time, features). The state is
    (the last kernel_size − 1 values of q, k and v before the convolution, S): (batch, channels,
    kernel_size − 1) and (batch, heads, value, key).
    """

    def __init__(
        self,
        features: int,
        *,
        num_heads: int,
        head_features: int,
        kernel_size: int = 4,
        low_rank: bool = True,
        min_log_decay: float | None = None,
        epsilon: float = 1e-5,
    ):
        super().__init__()
        self.heads, self.head_features, self.low_rank = num_heads, head_features, low_rank
        inner = num_heads * head_features
        self.q_proj = nn.Linear(features, inner, bias=False)
        self.k_proj = nn.Linear(features, inner, bias=False)
        self.v_proj = nn.Linear(features, inner, bias=False)
        self.conv1d = nn.Conv1d(3 * inner, 3 * inner, kernel_size, groups=3 * inner, bias=False)
        self.forget_gate = ForgetGate(features, num_heads, head_features, low_rank, min_log_decay)
        self.b_proj = nn.Linear(features, num_heads, bias=False)
        if low_rank:
            self.g_a_proj = nn.Linear(features, head_features, bias=False)
            self.g_b_proj = nn.Linear(head_features, inner, bias=False)
        else:
            self.g_proj = nn.Linear(features, inner, bias=False)
        self.o_norm = nn.RMSNorm(head_features, eps=epsilon)
        self.o_proj = nn.Linear(inner, features, bias=False)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        window, s = self.init_state(x.shape[0]) if state is None else state
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        # The short convolution.
        window = torch.cat([window.to(x.dtype), qkv.mT], dim=-1)
        convolved = F.conv1d(window, self.conv1d.weight, groups=qkv.shape[-1])
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in F.silu(convolved).mT.chunk(3, dim=-1))
        q, k = l2_normalize(q) * self.head_features**-0.5, l2_normalize(k)
        alpha, beta = torch.exp(self.forget_gate(x)), torch.sigmoid(self.b_proj(x))

        # In each step, S decays by feature of k, and the value under the key moves toward v.
        outputs = []
        steps = (y.unbind(1) for y in (q, k, v, alpha[..., None, :], beta[..., None]))
        for q_t, k_t, v_t, alpha_t, beta_t in zip(*steps, strict=True):
            s = s * alpha_t
            error = beta_t * (v_t - (s @ k_t[..., None])[..., 0])
            s = s + error[..., :, None] * k_t[..., None, :]
            outputs.append((s @ q_t[..., None])[..., 0])
        g = self.g_b_proj(self.g_a_proj(x)) if self.low_rank else self.g_proj(x)
        o = self.o_norm(torch.stack(outputs, dim=1)).flatten(-2)
        return self.o_proj(o * torch.sigmoid(g)), (window[..., x.shape[1] :], s)

    def init_state(self, batch_size: int) -> State:
        channels, _, kernel_size = self.conv1d.weight.shape
        window = self.b_proj.weight.new_zeros(batch_size, channels, kernel_size - 1)
        sizes = self.heads, self.head_features, self.head_features
        return window, self.b_proj.weight.new_zeros(batch_size, *sizes)
