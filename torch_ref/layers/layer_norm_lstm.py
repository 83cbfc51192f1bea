"""The LSTM with layer norm in plain PyTorch (labml.ai's LSTMCell)."""

__all__ = ["LayerNormLSTM"]

import torch
from torch import Tensor, nn

State = tuple[Tensor, Tensor]


class LayerNormLSTM(nn.Module):
    """An LSTM with normalized gates and a normalized cell.

        i, f, g, o = LN(x_t W_ih + h_{t−1} W_hh + b), each gate with its own layer norm
        c_t = σ(f) ⊙ c_{t−1} + σ(i) ⊙ tanh(g)
        h_t = σ(o) ⊙ tanh(LN(c_t))

    x is (batch, time, in_features), and the state is (h, c), each (batch, hidden_features). c
    itself is carried without normalization.
    """

    def __init__(self, in_features: int, hidden_features: int):
        super().__init__()
        self.hidden_lin = nn.Linear(hidden_features, 4 * hidden_features)
        self.input_lin = nn.Linear(in_features, 4 * hidden_features, bias=False)
        self.layer_norm = nn.ModuleList(nn.LayerNorm(hidden_features) for _ in range(4))
        self.layer_norm_c = nn.LayerNorm(hidden_features)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        state = self.init_state(x.shape[0]) if state is None else state
        outputs = []
        for x_t in x.unbind(1):
            state = self.step(x_t, state)
            outputs.append(state[0])
        return torch.stack(outputs, dim=1), state

    def step(self, x_t: Tensor, state: State) -> State:
        h, c = state
        gates = (self.input_lin(x_t) + self.hidden_lin(h)).chunk(4, dim=-1)
        i, f, g, o = (norm(gate) for norm, gate in zip(self.layer_norm, gates, strict=True))
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(self.layer_norm_c(c))
        return h, c

    def init_state(self, batch_size: int) -> State:
        zeros = self.input_lin.weight.new_zeros(batch_size, self.hidden_lin.in_features)
        return zeros, zeros
