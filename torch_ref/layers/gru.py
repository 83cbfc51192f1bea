"""The GRU in plain PyTorch."""

__all__ = ["GRUScratch"]

import torch
from torch import Tensor, nn

from torch_ref.layers.state import State


class GRUScratch(nn.Module):
    """A GRU with one layer and a pair of Linears per gate.

        r, z = σ(x_t W_i* + b_i* + h_{t−1} W_h* + b_h*)
        n = tanh(x_t W_in + b_in + r ⊙ (h_{t−1} W_hn + b_hn))
        h_t = (1 − z) ⊙ n + z ⊙ h_{t−1}

    Without `reset_after`, n = tanh(x_t W_in + b_in + (r ⊙ h_{t−1}) W_hn + b_hn).
    x is (batch, time, in_features), and the state is (h,) with h (1, batch, hidden_features).
    """

    def __init__(self, in_features: int, hidden_features: int, *, use_bias=True, reset_after=True):
        super().__init__()
        self.reset_after = reset_after
        self.hidden_features = hidden_features
        self.w_ir = nn.Linear(in_features, hidden_features, bias=use_bias)
        self.w_hr = nn.Linear(hidden_features, hidden_features, bias=use_bias)
        self.w_iz = nn.Linear(in_features, hidden_features, bias=use_bias)
        self.w_hz = nn.Linear(hidden_features, hidden_features, bias=use_bias)
        self.w_in = nn.Linear(in_features, hidden_features, bias=use_bias)
        self.w_hn = nn.Linear(hidden_features, hidden_features, bias=use_bias)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        [h] = self.init_state(x.shape[0]) if state is None else state
        outputs = []
        for x_t in x.unbind(1):
            r = torch.sigmoid(self.w_ir(x_t) + self.w_hr(h))
            z = torch.sigmoid(self.w_iz(x_t) + self.w_hz(h))
            # The reset gate comes after the product, as in torch, or before it, as in the paper.
            recurrent = r * self.w_hn(h) if self.reset_after else self.w_hn(r * h)
            n = torch.tanh(self.w_in(x_t) + recurrent)
            h = (1 - z) * n + z * h
            outputs.append(h[0])
        return torch.stack(outputs, dim=1), (h,)

    def init_state(self, batch_size: int) -> State:
        return (self.w_ir.weight.new_zeros(1, batch_size, self.hidden_features),)
