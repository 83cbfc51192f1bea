"""RWKV-4 in plain PyTorch (arXiv 2305.13048), with BlinkDL's keys."""

__all__ = ["RWKVBlock", "RWKVChannelMix", "RWKVTimeMix"]

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torch_ref.layers.state import State

EMPTY_EXPONENT = -1e38


def token_shift(x: Tensor, last: Tensor) -> Tensor:
    """`x_{t−1}` at each step, where `last` (batch, features) comes before the first step."""
    return torch.cat([last[:, None], x[:, :-1]], dim=1)


def wkv(k: Tensor, v: Tensor, w: Tensor, u: Tensor, sums: Sequence[Tensor]) -> tuple[Tensor, State]:
    """RWKV-4's average of the past, and the sums after the last step as (num, den, max)."""
    num, den, max = sums
    outputs = []
    for k_t, v_t in zip(k.unbind(1), v.unbind(1), strict=True):
        q = torch.maximum(max, u + k_t)
        past, now = torch.exp(max - q), torch.exp(u + k_t - q)
        outputs.append((past * num + now * v_t) / (past * den + now))
        q = torch.maximum(max - w, k_t)
        past, now = torch.exp(max - w - q), torch.exp(k_t - q)
        num, den, max = past * num + now * v_t, past * den + now, q
    return torch.stack(outputs, dim=1), (num, den, max)


class RWKVTimeMix(nn.Module):
    """The time mix of RWKV-4, which takes the place of attention.

        r, k, v = (μ ⊙ x_t + (1 − μ) ⊙ x_{t−1}) W, each with its own μ and W
        wkv_t = (Σ_{i<t} e^{−(t−1−i)w + k_i} v_i + e^{u + k_t} v_t)
              / (Σ_{i<t} e^{−(t−1−i)w + k_i} + e^{u + k_t})
        y_t = (σ(r) ⊙ wkv_t) W_o

    Here w = exp(time_decay) and u = time_first. The sums are stored as e^max · (num, den), so that
    no exponential overflows. x is (batch, time, features), and the state is (last x, num, den,
    max), each (batch, features).
    """

    def __init__(self, features: int):
        super().__init__()
        self.time_decay = nn.Parameter(torch.zeros(features))
        self.time_first = nn.Parameter(torch.zeros(features))
        self.time_mix_k = nn.Parameter(torch.full((1, 1, features), 0.5))
        self.time_mix_v = nn.Parameter(torch.full((1, 1, features), 0.5))
        self.time_mix_r = nn.Parameter(torch.full((1, 1, features), 0.5))
        self.key = nn.Linear(features, features, bias=False)
        self.value = nn.Linear(features, features, bias=False)
        self.receptance = nn.Linear(features, features, bias=False)
        self.output = nn.Linear(features, features, bias=False)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        last, *sums = self.init_state(x.shape[0]) if state is None else state
        # Each projection reads its own mixture of the current and the previous input.
        previous = token_shift(x, last)
        k = self.key(x * self.time_mix_k + previous * (1 - self.time_mix_k))
        v = self.value(x * self.time_mix_v + previous * (1 - self.time_mix_v))
        r = self.receptance(x * self.time_mix_r + previous * (1 - self.time_mix_r))
        # Average the values of the past with weights e^k, then gate and project the result.
        average, sums = wkv(k, v, self.time_decay.exp(), self.time_first, sums)
        return self.output(torch.sigmoid(r) * average), (x[:, -1], *sums)

    def init_state(self, batch_size: int) -> State:
        zeros = self.time_first.new_zeros(batch_size, len(self.time_first))
        return zeros, zeros, zeros, torch.full_like(zeros, EMPTY_EXPONENT)


class RWKVChannelMix(nn.Module):
    """The channel mix of RWKV-4, its feed-forward part.

        r, k = (μ ⊙ x_t + (1 − μ) ⊙ x_{t−1}) W, each with its own μ and W
        y_t = σ(r) ⊙ (max(k, 0)² W_v)

    x is (batch, time, features), and the state is (last x,).
    """

    def __init__(self, features: int, hidden_features: int):
        super().__init__()
        self.time_mix_k = nn.Parameter(torch.full((1, 1, features), 0.5))
        self.time_mix_r = nn.Parameter(torch.full((1, 1, features), 0.5))
        self.key = nn.Linear(features, hidden_features, bias=False)
        self.receptance = nn.Linear(features, features, bias=False)
        self.value = nn.Linear(hidden_features, features, bias=False)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        (last,) = self.init_state(x.shape[0]) if state is None else state
        previous = token_shift(x, last)
        k = self.key(x * self.time_mix_k + previous * (1 - self.time_mix_k))
        r = self.receptance(x * self.time_mix_r + previous * (1 - self.time_mix_r))
        return torch.sigmoid(r) * self.value(torch.relu(k) ** 2), (x[:, -1],)

    def init_state(self, batch_size: int) -> State:
        return (self.time_mix_k.new_zeros(batch_size, self.time_mix_k.shape[-1]),)


class RWKVBlock(nn.Module):
    """`x ← x + att(ln1(x))`, then `x ← x + ffn(ln2(x))`; the first block starts with `ln0`.

    The state is that of `att`, then that of `ffn`.
    """

    def __init__(self, features: int, hidden_features: int, *, layer_index: int = 0):
        super().__init__()
        self.layer_index = layer_index
        if layer_index == 0:
            self.ln0 = nn.LayerNorm(features)
        self.ln1 = nn.LayerNorm(features)
        self.ln2 = nn.LayerNorm(features)
        self.att = RWKVTimeMix(features)
        self.ffn = RWKVChannelMix(features, hidden_features)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        att_state, ffn_state = (None, None) if state is None else (state[:4], state[4:])
        if self.layer_index == 0:
            x = self.ln0(x)
        y, att_state = self.att(self.ln1(x), att_state)
        x = x + y
        y, ffn_state = self.ffn(self.ln2(x), ffn_state)
        return x + y, att_state + ffn_state
