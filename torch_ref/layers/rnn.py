"""The simple RNN in plain PyTorch (seeds 001 and 004)."""

import torch
from torch import Tensor, nn


class RNNScratch(nn.Module):
    """One layer: `h_t = φ(x_t W_ih + b_ih + h_{t−1} W_hh + b_hh)`, φ = tanh or relu.

    input is (time, batch, input_size), h0 and the last state (1, batch, hidden_size).
    """

    def __init__(self, input_size, hidden_size, nonlinearity="tanh", bias=True):
        super().__init__()
        self.hidden_size = hidden_size
        self.w_ih = nn.Linear(input_size, hidden_size, bias=bias)
        self.w_hh = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.act = {"tanh": nn.Tanh(), "relu": nn.ReLU()}[nonlinearity]

    def forward(self, input: Tensor, h0: Tensor | None = None) -> tuple[Tensor, Tensor]:
        hn = input.new_zeros(1, input.shape[1], self.hidden_size) if h0 is None else h0
        outputs = []
        for x in input:
            hn = self.act(self.w_ih(x) + self.w_hh(hn))
            outputs.append(hn)
        return torch.cat(outputs), hn


class RNNDeep(nn.Module):
    """Layers of RNNScratch, each reading the outputs of the one below.

    h0 and the last states are (num_layers, batch, hidden_size). The seed wrote the last states into
    h0, which cannot be differentiated and changes the caller's tensor; here they are new.
    """

    def __init__(self, input_size, hidden_size, nonlinearity="tanh", bias=True, num_layers=1):
        super().__init__()
        self.num_layers = num_layers
        self.rnns = nn.ModuleList(
            RNNScratch(input_size if i == 0 else hidden_size, hidden_size, nonlinearity, bias)
            for i in range(num_layers)
        )

    def forward(self, input: Tensor, h0: Tensor | None = None) -> tuple[Tensor, Tensor]:
        output, hn = input, []
        for i, rnn in enumerate(self.rnns):
            output, h = rnn(output, None if h0 is None else h0[i : i + 1])
            hn.append(h)
        return output, torch.cat(hn)


class RNNBidirectional(nn.Module):
    """Two whole stacks, one on reversed time, joined at the end.

    The states are (2 · num_layers, batch, hidden_size), forward and backward by turns. For one
    layer this is torch's `bidirectional=True`; for more, torch's layers each read both directions.
    """

    def __init__(self, input_size, hidden_size, nonlinearity="tanh", bias=True, num_layers=1):
        super().__init__()
        self.rnn_f = RNNDeep(input_size, hidden_size, nonlinearity, bias, num_layers)
        self.rnn_b = RNNDeep(input_size, hidden_size, nonlinearity, bias, num_layers)

    def forward(self, input: Tensor, h0: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h0_f, h0_b = (None, None) if h0 is None else (h0[0::2], h0[1::2])
        output_f, hn_f = self.rnn_f(input, h0_f)
        output_b, hn_b = self.rnn_b(input.flip(0), h0_b)
        output = torch.cat([output_f, output_b.flip(0)], dim=-1)
        return output, torch.stack([hn_f, hn_b], dim=1).flatten(0, 1)


class RNN(nn.Module):
    """The RNN cell of seed 004: `h_t = tanh(x_t U + h_{t−1} W + b)`, one bias, no transposes.

    x is (time, batch, inputs_dim), the state (batch, hidden_dim).
    """

    def __init__(self, inputs_dim: int, hidden_dim: int):
        super().__init__()
        self.U = nn.Parameter(torch.randn(inputs_dim, hidden_dim) / inputs_dim**0.5)
        self.W = nn.Parameter(torch.randn(hidden_dim, hidden_dim) / hidden_dim**0.5)
        self.b = nn.Parameter(torch.zeros(hidden_dim))

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = x.new_zeros(x.shape[1], self.b.shape[0]) if state is None else state
        outs = []
        for x_t in x:
            h = torch.tanh(x_t @ self.U + h @ self.W + self.b)
            outs.append(h)
        return torch.stack(outs), h
