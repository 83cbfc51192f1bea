"""RWKV-7 in plain PyTorch (arXiv 2503.14456), with BlinkDL's keys."""

__all__ = ["RWKV7Block", "RWKV7ChannelMix", "RWKV7TimeMix"]

import math

import torch
from torch import Tensor, nn

from torch_ref.layers.rwkv import token_shift
from torch_ref.layers.rwkv6 import by_head, low_rank, mixes
from torch_ref.layers.state import State


class RWKV7TimeMix(nn.Module):
    """The time mix of RWKV-7, which takes the place of attention.

        x_s = x_t + μ_s ⊙ (x_{t−1} − x_t),   s in r, w, k, v, a, g
        r, k, v = x_r W_r, x_k W_k, x_v W_v
        w = exp(−e^{−1/2} σ(w_0 + tanh(x_w w_1) w_2))
        v_first = v in the lowest layer; above it  v ← v + (v_first − v) ⊙ σ(v_0 + x_v v_1 v_2)
        a = σ(a_0 + x_a a_1 a_2),   g = σ(x_g g_1) g_2
        κ̂ = k ⊙ k_k / max(‖k ⊙ k_k‖, 1e-12) by head,   then  k ← k ⊙ (1 + (a − 1) ⊙ k_a)
        S_t = S_{t−1} (diag(w_t) − κ̂_t (κ̂_t ⊙ a_t)ᵀ) + v_t k_tᵀ,   o_t = S_t r_t     by head
        y_t = ((GroupNorm(o_t) + (Σ r ⊙ k ⊙ r_k) v) ⊙ g) W_o

    In the lowest layer, x is (batch, time, features). In all others, it is x followed by v_first,
    (batch, time, 2 · features). The output of every layer is y followed by v_first. The state is
    (last x, S) with S (batch, heads, value, key).
    """

    def __init__(
        self,
        features: int,
        *,
        head_size: int,
        decay_rank: int,
        rate_rank: int,
        value_rank: int,
        gate_rank: int,
        layer_index: int = 0,
    ):
        super().__init__()
        self.layer_index = layer_index
        self.heads = features // head_size
        self.x_r, self.x_w, self.x_k = mixes(features, 3)
        self.x_v, self.x_a, self.x_g = mixes(features, 3)
        self.w0, self.a0 = (nn.Parameter(torch.zeros(1, 1, features)) for _ in range(2))
        self.w1, self.w2 = low_rank(features, decay_rank)
        self.a1, self.a2 = low_rank(features, rate_rank)
        self.g1, self.g2 = low_rank(features, gate_rank)
        if layer_index > 0:
            self.v0 = nn.Parameter(torch.zeros(1, 1, features))
            self.v1, self.v2 = low_rank(features, value_rank)
        self.k_k = nn.Parameter(torch.ones(1, 1, features))
        self.k_a = nn.Parameter(torch.ones(1, 1, features))
        self.r_k = nn.Parameter(torch.zeros(self.heads, head_size))
        self.receptance = nn.Linear(features, features, bias=False)
        self.key = nn.Linear(features, features, bias=False)
        self.value = nn.Linear(features, features, bias=False)
        self.output = nn.Linear(features, features, bias=False)
        self.ln_x = nn.GroupNorm(self.heads, features, eps=64e-5)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        x, *v_first = (x,) if self.layer_index == 0 else x.chunk(2, dim=-1)
        last, s = self.init_state(x.shape[0]) if state is None else state
        # Each projection reads its own mixture of the current and the previous input.
        d = token_shift(x, last) - x
        x_r, x_w, x_k = x + d * self.x_r, x + d * self.x_w, x + d * self.x_k
        x_v, x_a, x_g = x + d * self.x_v, x + d * self.x_a, x + d * self.x_g
        r, k, v = self.receptance(x_r), self.key(x_k), self.value(x_v)
        # The decay, the learning rate and the gate are low-rank functions of the data, and above
        # the lowest layer, the values move toward v_first.
        w = torch.exp(
            -math.exp(-0.5) * torch.sigmoid(self.w0 + torch.tanh(x_w @ self.w1) @ self.w2)
        )
        for first in v_first:
            v = v + (first - v) * torch.sigmoid(self.v0 + x_v @ self.v1 @ self.v2)
        a = torch.sigmoid(self.a0 + x_a @ self.a1 @ self.a2)
        g = torch.sigmoid(x_g @ self.g1) @ self.g2
        # The removal key is normalized by head, and the key is scaled by the learning rate.
        removal = (k * self.k_k).unflatten(-1, (self.heads, -1))
        removal = nn.functional.normalize(removal, dim=-1, eps=1e-12).flatten(-2)
        k = k * (1 + (a - 1) * self.k_a)

        # In each step, the state decays, loses the value under the removal key, and stores a new
        # one.
        outputs = []
        steps = (by_head(y, self.heads) for y in (r, w, k, v, removal, a))
        for r_t, w_t, k_t, v_t, removal_t, a_t in zip(*steps, strict=True):
            removed = s @ removal_t[..., None] * (removal_t * a_t)[..., None, :]
            s = s * w_t[..., None, :] - removed + v_t[..., :, None] * k_t[..., None, :]
            outputs.append((s @ r_t[..., None]).flatten(1))
        # Normalize by head, and add the bonus of the current step.
        o = torch.stack(outputs, dim=1)
        normed = self.ln_x(o.flatten(0, 1)).view_as(o)
        strength = (r * k).unflatten(-1, (self.heads, -1)).mul(self.r_k).sum(-1, keepdim=True)
        bonus = (strength * v.unflatten(-1, (self.heads, -1))).flatten(-2)
        y = self.output((normed + bonus) * g)
        return torch.cat([y, *(v_first or [v])], dim=-1), (x[:, -1], s)

    def init_state(self, batch_size: int) -> State:
        last = self.r_k.new_zeros(batch_size, self.r_k.numel())
        return last, self.r_k.new_zeros(batch_size, *self.r_k.shape, self.r_k.shape[-1])


class RWKV7ChannelMix(nn.Module):
    """The channel mix of RWKV-7, its feed-forward part.

        y_t = max((x_t + μ ⊙ (x_{t−1} − x_t)) W_k, 0)² W_v

    x is (batch, time, features), and the state is (last x,).
    """

    def __init__(self, features: int, hidden_features: int):
        super().__init__()
        self.x_k = nn.Parameter(torch.full((1, 1, features), 0.5))
        self.key = nn.Linear(features, hidden_features, bias=False)
        self.value = nn.Linear(hidden_features, features, bias=False)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        (last,) = self.init_state(x.shape[0]) if state is None else state
        k = self.key(x + (token_shift(x, last) - x) * self.x_k)
        return self.value(torch.relu(k) ** 2), (x[:, -1],)

    def init_state(self, batch_size: int) -> State:
        return (self.x_k.new_zeros(batch_size, self.x_k.shape[-1]),)


class RWKV7Block(nn.Module):
    """`x ← x + att(ln1(x))`, then `x ← x + ffn(ln2(x))`; the first block starts with `ln0`.

    In the first block, x is (batch, time, features). In all others, it is x followed by v_first,
    and so is the output of every block. The state is that of `att`, then that of `ffn`.
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        *,
        head_size: int,
        decay_rank: int,
        rate_rank: int,
        value_rank: int,
        gate_rank: int,
        layer_index: int = 0,
    ):
        super().__init__()
        self.layer_index = layer_index
        if layer_index == 0:
            self.ln0 = nn.LayerNorm(features)
        self.ln1 = nn.LayerNorm(features)
        self.ln2 = nn.LayerNorm(features)
        self.att = RWKV7TimeMix(
            features,
            head_size=head_size,
            decay_rank=decay_rank,
            rate_rank=rate_rank,
            value_rank=value_rank,
            gate_rank=gate_rank,
            layer_index=layer_index,
        )
        self.ffn = RWKV7ChannelMix(features, hidden_features)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        att_state, ffn_state = (None, None) if state is None else (state[:2], state[2:])
        # Above the lowest block, the input also contains the values of the lowest one.
        x, *v_first = (x,) if self.layer_index == 0 else x.chunk(2, dim=-1)
        if self.layer_index == 0:
            x = self.ln0(x)
        y, att_state = self.att(torch.cat([self.ln1(x), *v_first], dim=-1), att_state)
        # The time mix returns these values beside its output, and the block passes them on.
        y, v_first = y.chunk(2, dim=-1)
        x = x + y
        y, ffn_state = self.ffn(self.ln2(x), ffn_state)
        return torch.cat([x + y, v_first], dim=-1), att_state + ffn_state
