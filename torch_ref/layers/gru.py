"""The GRU in plain PyTorch (seed 001)."""

import torch
from torch import Tensor, nn


class GRUScratch(nn.Module):
    """One layer of GRU, a pair of Linears a gate.

        r, z = σ(x_t W_i* + b_i* + h_{t−1} W_h* + b_h*)
        n = tanh(x_t W_in + b_in + r ⊙ (h_{t−1} W_hn + b_hn))
        h_t = (1 − z) ⊙ n + z ⊙ h_{t−1}

    input is (time, batch, input_size), h0 and the last state (1, batch, hidden_size).
    """

    def __init__(self, input_size, hidden_size, bias=True):
        super().__init__()
        self.hidden_size = hidden_size
        self.w_ir = nn.Linear(input_size, hidden_size, bias=bias)
        self.w_hr = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.w_iz = nn.Linear(input_size, hidden_size, bias=bias)
        self.w_hz = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.w_in = nn.Linear(input_size, hidden_size, bias=bias)
        self.w_hn = nn.Linear(hidden_size, hidden_size, bias=bias)

    def forward(self, input: Tensor, h0: Tensor | None = None) -> tuple[Tensor, Tensor]:
        hn = input.new_zeros(1, input.shape[1], self.hidden_size) if h0 is None else h0
        outputs = []
        for x in input:
            r = torch.sigmoid(self.w_ir(x) + self.w_hr(hn))
            z = torch.sigmoid(self.w_iz(x) + self.w_hz(hn))
            n = torch.tanh(self.w_in(x) + r * self.w_hn(hn))
            hn = (1 - z) * n + z * hn
            outputs.append(hn)
        return torch.cat(outputs), hn
