"""minGRU and minLSTM in plain PyTorch (arXiv 2410.01201)."""

__all__ = ["MinGRU", "MinLSTM"]

import torch
from torch import Tensor, nn

from torch_ref.layers.state import State


class MinGRUCell(nn.Module):
    """`h_t = (1 − z_t) ⊙ h_{t−1} + z_t ⊙ (x_t W_h + b_h)`, z_t = σ(x_t W_z + b_z)."""

    def __init__(self, in_features: int, hidden_features: int, *, use_bias=True):
        super().__init__()
        self.linear_z = nn.Linear(in_features, hidden_features, bias=use_bias)
        self.linear_h = nn.Linear(in_features, hidden_features, bias=use_bias)

    def forward(self, x_t: Tensor, h: Tensor) -> Tensor:
        z = torch.sigmoid(self.linear_z(x_t))
        return (1 - z) * h + z * self.linear_h(x_t)


class MinLSTMCell(nn.Module):
    """`h_t = f'_t ⊙ h_{t−1} + i'_t ⊙ (x_t W_h + b_h)`, f' = f / (f + i), i' = i / (f + i)."""

    def __init__(self, in_features: int, hidden_features: int, *, use_bias=True):
        super().__init__()
        self.linear_f = nn.Linear(in_features, hidden_features, bias=use_bias)
        self.linear_i = nn.Linear(in_features, hidden_features, bias=use_bias)
        self.linear_h = nn.Linear(in_features, hidden_features, bias=use_bias)

    def forward(self, x_t: Tensor, h: Tensor) -> Tensor:
        f, i = torch.sigmoid(self.linear_f(x_t)), torch.sigmoid(self.linear_i(x_t))
        return f / (f + i) * h + i / (f + i) * self.linear_h(x_t)


class MinRNN(nn.Module):
    """Layers of a cell, each of which reads the outputs of the layer below.

    x is (batch, time, in_features), and the state is (h,) with h (num_layers, batch,
    hidden_features).
    """

    cell: type[MinGRUCell] | type[MinLSTMCell]

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        num_layers=1,
        use_bias=True,
        dropout_rate=0.0,
    ):
        super().__init__()
        self.hidden_features = hidden_features
        self.dropout = nn.Dropout(dropout_rate)
        self.layers = nn.ModuleList(
            self.cell(hidden_features if i else in_features, hidden_features, use_bias=use_bias)
            for i in range(num_layers)
        )

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        [hs] = self.init_state(x.shape[0]) if state is None else state
        last = []
        for i, (cell, h) in enumerate(zip(self.layers, hs, strict=True)):
            outputs = []
            for x_t in (self.dropout(x) if i else x).unbind(1):
                h = cell(x_t, h)
                outputs.append(h)
            x = torch.stack(outputs, dim=1)
            last.append(h)
        return x, (torch.stack(last),)

    def init_state(self, batch_size: int) -> State:
        weight = next(self.parameters())
        return (weight.new_zeros(len(self.layers), batch_size, self.hidden_features),)


class MinGRU(MinRNN):
    """Layers of `MinGRUCell`."""

    cell = MinGRUCell


class MinLSTM(MinRNN):
    """Layers of `MinLSTMCell`."""

    cell = MinLSTMCell
