"""The simple RNN in plain PyTorch."""

__all__ = ["RNN", "RNNDeep", "RNNScratch"]

import torch
from torch import Tensor, nn

from torch_ref.layers.state import State


class RNNScratch(nn.Module):
    """One layer: `h_t = φ(x_t W_ih + b_ih + h_{t−1} W_hh + b_hh)`, φ = tanh or relu.

    x is (batch, time, in_features), and the state is (h,) with h (1, batch, hidden_features).
    """

    def __init__(
        self, in_features: int, hidden_features: int, *, nonlinearity="tanh", use_bias=True
    ):
        super().__init__()
        self.hidden_features = hidden_features
        self.w_ih = nn.Linear(in_features, hidden_features, bias=use_bias)
        self.w_hh = nn.Linear(hidden_features, hidden_features, bias=use_bias)
        self.act = {"tanh": nn.Tanh(), "relu": nn.ReLU()}[nonlinearity]

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        [h] = self.init_state(x.shape[0]) if state is None else state
        outputs = []
        for x_t in x.unbind(1):
            h = self.act(self.w_ih(x_t) + self.w_hh(h))
            outputs.append(h[0])
        return torch.stack(outputs, dim=1), (h,)

    def init_state(self, batch_size: int) -> State:
        return (self.w_ih.weight.new_zeros(1, batch_size, self.hidden_features),)


class RNNDeep(nn.Module):
    """Layers of RNNScratch, each of which reads the outputs of the layer below.

    The state is (h,) with h (num_layers, batch, hidden_features).
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        num_layers=1,
        nonlinearity="tanh",
        use_bias=True,
    ):
        super().__init__()
        self.rnns = nn.ModuleList(
            RNNScratch(
                hidden_features if layer else in_features,
                hidden_features,
                nonlinearity=nonlinearity,
                use_bias=use_bias,
            )
            for layer in range(num_layers)
        )

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        last = []
        for layer, rnn in enumerate(self.rnns):
            x, [h] = rnn(x, None if state is None else (state[0][layer : layer + 1],))
            last.append(h)
        return x, (torch.cat(last),)


class RNN(nn.Module):
    """The RNN `h_t = tanh(x_t U + h_{t−1} W + b)`, with one bias and untransposed weights.

    x is (batch, time, in_features), and the state is (h,) with h (1, batch, hidden_features).
    """

    def __init__(self, in_features: int, hidden_features: int):
        super().__init__()
        self.U = nn.Parameter(torch.randn(in_features, hidden_features) / in_features**0.5)
        self.W = nn.Parameter(torch.randn(hidden_features, hidden_features) / hidden_features**0.5)
        self.b = nn.Parameter(torch.zeros(hidden_features))

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        [h] = self.init_state(x.shape[0]) if state is None else state
        outputs = []
        for x_t in x.unbind(1):
            h = torch.tanh(x_t @ self.U + h @ self.W + self.b)
            outputs.append(h[0])
        return torch.stack(outputs, dim=1), (h,)

    def init_state(self, batch_size: int) -> State:
        return (self.W.new_zeros(1, batch_size, len(self.b)),)
