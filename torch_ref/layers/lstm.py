"""The LSTM in plain PyTorch."""

__all__ = ["LSTMDeep", "LSTMProj", "LSTMScratch"]

import torch
from torch import Tensor, nn

from torch_ref.layers.state import State


class LSTMScratch(nn.Module):
    """An LSTM with one layer and a pair of Linears per gate.

        i, f, o = σ(x_t W_i* + b_i* + h_{t−1} W_h* + b_h*),   g = tanh(the same)
        c_t = f ⊙ c_{t−1} + i ⊙ g,   h_t = o ⊙ tanh(c_t)

    With `use_peepholes`, p_i ⊙ c_{t−1}, p_f ⊙ c_{t−1} and p_o ⊙ c_t are added inside the σ.
    x is (batch, time, in_features), and the state is (h, c), each (1, batch, hidden_features).
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        out_features=None,
        use_bias=True,
        use_peepholes=False,
    ):
        super().__init__()
        self.hidden_features = hidden_features
        self.out_features = out_features or hidden_features
        self.w_ii = nn.Linear(in_features, hidden_features, bias=use_bias)
        self.w_hi = nn.Linear(self.out_features, hidden_features, bias=use_bias)
        self.w_if = nn.Linear(in_features, hidden_features, bias=use_bias)
        self.w_hf = nn.Linear(self.out_features, hidden_features, bias=use_bias)
        self.w_ig = nn.Linear(in_features, hidden_features, bias=use_bias)
        self.w_hg = nn.Linear(self.out_features, hidden_features, bias=use_bias)
        self.w_io = nn.Linear(in_features, hidden_features, bias=use_bias)
        self.w_ho = nn.Linear(self.out_features, hidden_features, bias=use_bias)
        self.peephole = nn.Parameter(torch.randn(3 * hidden_features)) if use_peepholes else None

    def output(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        h, c = self.init_state(x.shape[0]) if state is None else state
        p_i, p_f, p_o = c.new_zeros(3) if self.peephole is None else self.peephole.chunk(3)
        outputs = []
        for x_t in x.unbind(1):
            # The gates i and f see the old cell through their peepholes, and o sees the new one.
            i = torch.sigmoid(self.w_ii(x_t) + self.w_hi(h) + p_i * c)
            f = torch.sigmoid(self.w_if(x_t) + self.w_hf(h) + p_f * c)
            g = torch.tanh(self.w_ig(x_t) + self.w_hg(h))
            c = f * c + i * g
            o = torch.sigmoid(self.w_io(x_t) + self.w_ho(h) + p_o * c)
            h = self.output(o * torch.tanh(c))
            outputs.append(h[0])
        return torch.stack(outputs, dim=1), (h, c)

    def init_state(self, batch_size: int) -> State:
        sizes = self.out_features, self.hidden_features
        return tuple(self.w_ii.weight.new_zeros(1, batch_size, size) for size in sizes)


class LSTMProj(LSTMScratch):
    """LSTMScratch with `h_t = w_hr(o ⊙ tanh(c_t))`. Unlike in torch, the projection has a bias.

    h and the outputs have size proj_features, and c has size hidden_features.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        proj_features: int,
        *,
        proj_bias=True,
        **options,
    ):
        super().__init__(in_features, hidden_features, out_features=proj_features, **options)
        self.w_hr = nn.Linear(hidden_features, proj_features, bias=proj_bias)

    def output(self, h: Tensor) -> Tensor:
        return self.w_hr(h)


class LSTMDeepCell(nn.Module):
    """One step of LSTMDeep, where x, h and c are (batch, features)."""

    def __init__(self, in_features: int, hidden_features: int):
        super().__init__()
        self.hidden_lin = nn.Linear(hidden_features, 4 * hidden_features)
        self.input_lin = nn.Linear(in_features, 4 * hidden_features, bias=False)

    def forward(self, x: Tensor, state: State) -> State:
        h, c = state
        i, f, g, o = (self.input_lin(x) + self.hidden_lin(h)).chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class LSTMDeep(nn.Module):
    """LSTM layers with one bias each and the gates side by side, as in labml's LSTM.

        i, f, g, o = x_t W_ih + h_{t−1} W_hh + b
        c_t = σ(f) ⊙ c_{t−1} + σ(i) ⊙ tanh(g),   h_t = σ(o) ⊙ tanh(c_t)

    The x_t of a layer is the h_t of the layer below. x is (batch, time, in_features), and the state
    is (h, c), each (num_layers, batch, hidden_features).
    """

    def __init__(self, in_features: int, hidden_features: int, num_layers: int):
        super().__init__()
        self.hidden_features = hidden_features
        sizes = in_features, *(num_layers - 1) * (hidden_features,)
        self.cells = nn.ModuleList(LSTMDeepCell(size, hidden_features) for size in sizes)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        state = self.init_state(x.shape[0]) if state is None else state
        last = []
        for cell, *cell_state in zip(self.cells, *state, strict=True):
            outputs = []
            for x_t in x.unbind(1):
                cell_state = cell(x_t, cell_state)
                outputs.append(cell_state[0])
            x = torch.stack(outputs, dim=1)
            last.append(cell_state)
        h, c = map(torch.stack, zip(*last, strict=True))
        return x, (h, c)

    def init_state(self, batch_size: int) -> State:
        shape = len(self.cells), batch_size, self.hidden_features
        zeros = next(self.parameters()).new_zeros(shape)
        return zeros, zeros
