"""The LSTM in plain PyTorch (seed 001)."""

import torch
from torch import Tensor, nn


class LSTMScratch(nn.Module):
    """One layer of LSTM, a pair of Linears a gate.

        i, f, o = σ(x_t W_i* + b_i* + h_{t−1} W_h* + b_h*),   g = tanh(the same)
        c_t = f ⊙ c_{t−1} + i ⊙ g,   h_t = o ⊙ tanh(c_t)

    input is (time, batch, input_size); h0, c0 and the last states (1, batch, hidden_size).
    """

    def __init__(self, input_size, hidden_size, bias=True, *, output_size=None):
        super().__init__()
        self.hidden_size = hidden_size
        self.output_size = output_size or hidden_size
        self.w_ii = nn.Linear(input_size, hidden_size, bias=bias)
        self.w_hi = nn.Linear(self.output_size, hidden_size, bias=bias)
        self.w_if = nn.Linear(input_size, hidden_size, bias=bias)
        self.w_hf = nn.Linear(self.output_size, hidden_size, bias=bias)
        self.w_ig = nn.Linear(input_size, hidden_size, bias=bias)
        self.w_hg = nn.Linear(self.output_size, hidden_size, bias=bias)
        self.w_io = nn.Linear(input_size, hidden_size, bias=bias)
        self.w_ho = nn.Linear(self.output_size, hidden_size, bias=bias)

    def output(self, h: Tensor) -> Tensor:
        return h

    def forward(
        self, input: Tensor, h0: Tensor | None = None, c0: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch_size = input.shape[1]
        hn = input.new_zeros(1, batch_size, self.output_size) if h0 is None else h0
        cn = input.new_zeros(1, batch_size, self.hidden_size) if c0 is None else c0
        outputs = []
        for x in input:
            i = torch.sigmoid(self.w_ii(x) + self.w_hi(hn))
            f = torch.sigmoid(self.w_if(x) + self.w_hf(hn))
            g = torch.tanh(self.w_ig(x) + self.w_hg(hn))
            o = torch.sigmoid(self.w_io(x) + self.w_ho(hn))
            cn = f * cn + i * g
            hn = self.output(o * torch.tanh(cn))
            outputs.append(hn)
        return torch.cat(outputs), (hn, cn)


class LSTMProj(LSTMScratch):
    """LSTMScratch with `h_t = w_hr(o ⊙ tanh(c_t))`; unlike torch's, the projection has a bias.

    h0 and the outputs have proj_size features, c0 has hidden_size.
    """

    def __init__(self, input_size, hidden_size, proj_size, bias=True):
        super().__init__(input_size, hidden_size, bias, output_size=proj_size)
        self.w_hr = nn.Linear(hidden_size, proj_size, bias=bias)

    def output(self, h: Tensor) -> Tensor:
        return self.w_hr(h)
