"""Two stacks that run both ways over a sequence, in plain PyTorch."""

__all__ = ["RNNBidirectional"]

import torch
from torch import Tensor, nn

from torch_ref.layers.rnn import RNNDeep
from torch_ref.layers.state import State


class RNNBidirectional(nn.Module):
    """Two whole stacks, one on reversed time, joined at the end.

    The state is (h forward, h backward), each (num_layers, batch, hidden_features). For one layer
    this is torch's `bidirectional=True`; for more, torch's layers each read both directions.
    """

    def __init__(self, in_features: int, hidden_features: int, **options):
        super().__init__()
        self.rnn_f = RNNDeep(in_features, hidden_features, **options)
        self.rnn_b = RNNDeep(in_features, hidden_features, **options)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        forward, backward = (None, None) if state is None else (state[:1], state[1:])
        y_f, forward = self.rnn_f(x, forward)
        y_b, backward = self.rnn_b(x.flip(1), backward)
        return torch.cat([y_f, y_b.flip(1)], dim=-1), forward + backward
