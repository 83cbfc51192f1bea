"""The mLSTM in plain PyTorch (arXiv 2405.04517), with the keys of transformers."""

__all__ = ["MLSTM"]

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.state import State


class HeadNorm(nn.Module):
    """Subtracts the mean of each head, divides by its standard deviation, and scales."""

    def __init__(self, num_heads: int, features: int, epsilon: float):
        super().__init__()
        self.num_heads, self.epsilon = num_heads, epsilon
        self.weight = nn.Parameter(torch.ones(num_heads * features))

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (self.num_heads, -1))
        return F.layer_norm(heads, heads.shape[-1:], eps=self.epsilon).flatten(-2) * self.weight


class MLSTM(nn.Module):
    """The mixer of xLSTM.

        q, k, v = x W_q / √key_features, x W_k, x W_v                      by head
        i, f = cap(x W_i + b_i), cap(x W_f + b_f),   cap(a) = c tanh(a / c)
        C_t = σ(f_t) C_{t−1} + exp(i_t) v_t k_tᵀ
        n_t = σ(f_t) n_{t−1} + exp(i_t) k_t
        h_t = C_t q_t / (max(|n_tᵀ q_t|, 1) + ε exp(m_t))
        y = (norm(h) ⊙ σ(x W_o)) W_out                                     norm: that of each head

    x and y are (batch, time, features). The state is (C exp(−m), n exp(−m), m), with C (batch,
    heads, value, key) and m_t = max(log σ(f_t) + m_{t−1}, i_t). Without exp(−m), C and n would
    overflow. If `fused`, two matrices hold those of q, k, v and o, and those of i and f.
    """

    def __init__(
        self,
        features: int,
        *,
        num_heads: int,
        key_features: int,
        value_features: int,
        gate_soft_cap: float = 15.0,
        normalizer_epsilon: float = 1e-6,
        epsilon: float = 1e-6,
        fused: bool = False,
    ):
        super().__init__()
        self.num_heads, self.key_features = num_heads, key_features
        self.gate_soft_cap, self.fused = gate_soft_cap, fused
        self.normalizer_epsilon = normalizer_epsilon
        keys, values = num_heads * key_features, num_heads * value_features
        self.sizes = keys, keys, values, values
        if fused:
            self.qkv_opreact = nn.Linear(features, sum(self.sizes), bias=False)
            self.ifgate_preact = nn.Linear(features, 2 * num_heads)
        else:
            self.q = nn.Linear(features, keys, bias=False)
            self.k = nn.Linear(features, keys, bias=False)
            self.v = nn.Linear(features, values, bias=False)
            self.ogate_preact = nn.Linear(features, values, bias=False)
            self.igate_preact = nn.Linear(features, num_heads)
            self.fgate_preact = nn.Linear(features, num_heads)
        self.multihead_norm = HeadNorm(num_heads, value_features, epsilon)
        self.out_proj = nn.Linear(values, features, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k, v, and the gates o, i and f before their functions."""
        if self.fused:
            q, k, v, o = self.qkv_opreact(x).split(self.sizes, dim=-1)
            return q, k, v, o, *self.ifgate_preact(x).chunk(2, dim=-1)
        gates = self.ogate_preact(x), self.igate_preact(x), self.fgate_preact(x)
        return self.q(x), self.k(x), self.v(x), *gates

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        c, n, m = self.init_state(x.shape[0]) if state is None else state
        q, k, v, o, i, f = self.project(x)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)) for part in (q, k, v))
        q = q * self.key_features**-0.5
        i, f = (self.gate_soft_cap * torch.tanh(gate / self.gate_soft_cap) for gate in (i, f))
        outputs = []
        steps = zip(*(part.unbind(1) for part in (q, k, v, i, F.logsigmoid(f))), strict=True)
        for q_t, k_t, v_t, i_t, log_f_t in steps:
            # Scale both terms of C and of n by exp(−m), where m is the larger exponent.
            before, m = m, torch.maximum(log_f_t + m, i_t)
            forget, let_in = torch.exp(log_f_t + before - m), torch.exp(i_t - m)
            k_t = let_in[..., None] * k_t
            c = forget[..., None, None] * c + v_t[..., :, None] * k_t[..., None, :]
            n = forget[..., None] * n + k_t
            total = (n * q_t).sum(dim=-1)
            divisor = torch.maximum(total.abs(), torch.exp(-m)) + self.normalizer_epsilon
            outputs.append((c @ q_t[..., None])[..., 0] / divisor[..., None])
        h = self.multihead_norm(torch.stack(outputs, dim=1).flatten(-2))
        return self.out_proj(h * torch.sigmoid(o)), (c, n, m)

    def init_state(self, batch_size: int) -> State:
        heads, keys = (batch_size, self.num_heads), self.key_features
        zeros = self.out_proj.weight.new_zeros
        return (
            zeros(*heads, self.sizes[2] // self.num_heads, keys),
            zeros(*heads, keys),
            zeros(heads),
        )
