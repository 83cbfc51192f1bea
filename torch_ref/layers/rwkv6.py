"""RWKV-6 in plain PyTorch (arXiv 2404.05892), with BlinkDL's keys."""

__all__ = ["RWKV6Block", "RWKV6ChannelMix", "RWKV6TimeMix"]

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from torch_ref.layers.rwkv import token_shift
from torch_ref.layers.state import State


class RWKV6TimeMix(nn.Module):
    """The time mix of RWKV-6, which takes the place of attention.

        d_t = x_{t−1} − x_t
        m_s = tanh((x_t + d_t ⊙ μ_x) A)_s B_s,   x_s = x_t + d_t ⊙ (μ_s + m_s),   s in w, k, v, r, g
        r, k, v = x_r W_r, x_k W_k, x_v W_v,   g = silu(x_g W_g)
        w = exp(−exp(time_decay + tanh(x_w D_1) D_2))
        o_t = r_tᵀ (S_{t−1} + diag(u) k_t v_tᵀ),   S_t = diag(w_t) S_{t−1} + k_t v_tᵀ     by head
        y_t = (GroupNorm(o_t) ⊙ g) W_o

    x is (batch, time, features), and the state is (last x, S) with S (batch, heads, key, value).
    """

    def __init__(self, features: int, *, head_size: int, mix_rank: int, decay_rank: int):
        super().__init__()
        self.heads = features // head_size
        self.time_maa_x, self.time_maa_w, self.time_maa_k = mixes(features, 3)
        self.time_maa_v, self.time_maa_r, self.time_maa_g = mixes(features, 3)
        self.time_maa_w1 = nn.Parameter(torch.zeros(features, 5 * mix_rank))
        self.time_maa_w2 = nn.Parameter(torch.zeros(5, mix_rank, features))
        self.time_decay = nn.Parameter(torch.zeros(1, 1, features))
        self.time_decay_w1, self.time_decay_w2 = low_rank(features, decay_rank)
        self.time_faaaa = nn.Parameter(torch.zeros(self.heads, head_size))
        self.receptance = nn.Linear(features, features, bias=False)
        self.key = nn.Linear(features, features, bias=False)
        self.value = nn.Linear(features, features, bias=False)
        self.gate = nn.Linear(features, features, bias=False)
        self.output = nn.Linear(features, features, bias=False)
        self.ln_x = nn.GroupNorm(self.heads, features, eps=64e-5)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        last, s = self.init_state(x.shape[0]) if state is None else state
        # Each projection reads its own mixture of the current and the previous input.
        d = token_shift(x, last) - x
        hidden = torch.tanh((x + d * self.time_maa_x) @ self.time_maa_w1)
        m_w, m_k, m_v, m_r, m_g = (
            part @ up for part, up in zip(hidden.chunk(5, dim=-1), self.time_maa_w2, strict=True)
        )
        x_w = x + d * (self.time_maa_w + m_w)
        x_k = x + d * (self.time_maa_k + m_k)
        x_v = x + d * (self.time_maa_v + m_v)
        x_r = x + d * (self.time_maa_r + m_r)
        x_g = x + d * (self.time_maa_g + m_g)
        r, k, v = self.receptance(x_r), self.key(x_k), self.value(x_v)
        g = nn.functional.silu(self.gate(x_g))
        # The decay is a low-rank function of the data.
        z = self.time_decay + torch.tanh(x_w @ self.time_decay_w1) @ self.time_decay_w2
        w = torch.exp(-torch.exp(z))

        # Each output reads the state before the step, and the current step with a bonus.
        outputs = []
        for r_t, w_t, k_t, v_t in zip(*(by_head(y, self.heads) for y in (r, w, k, v)), strict=True):
            kv = k_t[..., :, None] * v_t[..., None, :]
            read = s + self.time_faaaa[..., None] * kv
            outputs.append((r_t[..., None, :] @ read).flatten(1))
            s = w_t[..., None] * s + kv
        o = torch.stack(outputs, dim=1)
        normed = self.ln_x(o.flatten(0, 1)).view_as(o)
        return self.output(normed * g), (x[:, -1], s)

    def init_state(self, batch_size: int) -> State:
        u = self.time_faaaa
        last = u.new_zeros(batch_size, u.numel())
        return last, u.new_zeros(batch_size, *u.shape, u.shape[-1])


def by_head(x: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Splits (batch, time, features) into (batch, heads, head size) for each step."""
    return x.unflatten(-1, (heads, -1)).unbind(1)


def mixes(features: int, count: int) -> Iterator[nn.Parameter]:
    """The parameters μ of token shifts."""
    return (nn.Parameter(torch.full((1, 1, features), 0.5)) for _ in range(count))


def low_rank(features: int, rank: int) -> tuple[nn.Parameter, nn.Parameter]:
    """A matrix that projects down to the rank, and one that projects up again."""
    return nn.Parameter(torch.zeros(features, rank)), nn.Parameter(torch.zeros(rank, features))


class RWKV6ChannelMix(nn.Module):
    """The channel mix of RWKV-6, its feed-forward part.

        k, r = (x_t + μ ⊙ (x_{t−1} − x_t)) W, each with its own μ and W
        y_t = σ(r) ⊙ (max(k, 0)² W_v)

    x is (batch, time, features), and the state is (last x,).
    """

    def __init__(self, features: int, hidden_features: int):
        super().__init__()
        self.time_maa_k, self.time_maa_r = mixes(features, 2)
        self.key = nn.Linear(features, hidden_features, bias=False)
        self.receptance = nn.Linear(features, features, bias=False)
        self.value = nn.Linear(hidden_features, features, bias=False)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        (last,) = self.init_state(x.shape[0]) if state is None else state
        d = token_shift(x, last) - x
        k = self.key(x + d * self.time_maa_k)
        r = self.receptance(x + d * self.time_maa_r)
        return torch.sigmoid(r) * self.value(torch.relu(k) ** 2), (x[:, -1],)

    def init_state(self, batch_size: int) -> State:
        return (self.time_maa_k.new_zeros(batch_size, self.time_maa_k.shape[-1]),)


class RWKV6Block(nn.Module):
    """`x ← x + att(ln1(x))`, then `x ← x + ffn(ln2(x))`; the first block starts with `ln0`.

    The state is that of `att`, then that of `ffn`.
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        *,
        head_size: int,
        mix_rank: int,
        decay_rank: int,
        layer_index: int = 0,
    ):
        super().__init__()
        self.layer_index = layer_index
        if layer_index == 0:
            self.ln0 = nn.LayerNorm(features)
        self.ln1 = nn.LayerNorm(features)
        self.ln2 = nn.LayerNorm(features)
        self.att = RWKV6TimeMix(
            features, head_size=head_size, mix_rank=mix_rank, decay_rank=decay_rank
        )
        self.ffn = RWKV6ChannelMix(features, hidden_features)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        att_state, ffn_state = (None, None) if state is None else (state[:2], state[2:])
        if self.layer_index == 0:
            x = self.ln0(x)
        y, att_state = self.att(self.ln1(x), att_state)
        x = x + y
        y, ffn_state = self.ffn(self.ln2(x), ffn_state)
        return x + y, att_state + ffn_state
