"""The LSTM with layer norm in plain PyTorch (seed 003, labml's LSTMCell)."""

import torch
from torch import Tensor, nn


class LayerNormLSTMCell(nn.Module):
    """One step of an LSTM with its gates and its cell normalised.

        i, f, g, o = LN(x_t W_ih + h_{t−1} W_hh + b), each gate with its own layer norm
        c_t = σ(f) ⊙ c_{t−1} + σ(i) ⊙ tanh(g)
        h_t = σ(o) ⊙ tanh(LN(c_t))

    x is (batch, input_size), h and c are (batch, hidden_size). c is returned as it is.
    """

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__()
        self.hidden_lin = nn.Linear(hidden_size, 4 * hidden_size)
        self.input_lin = nn.Linear(input_size, 4 * hidden_size, bias=False)
        self.layer_norm = nn.ModuleList(nn.LayerNorm(hidden_size) for _ in range(4))
        self.layer_norm_c = nn.LayerNorm(hidden_size)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        gates = (self.input_lin(x) + self.hidden_lin(h)).chunk(4, dim=-1)
        i, f, g, o = (norm(gate) for norm, gate in zip(self.layer_norm, gates, strict=True))
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(self.layer_norm_c(c))
        return h, c
