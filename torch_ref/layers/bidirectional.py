"""Two stacks that run over a sequence in opposite directions, in plain PyTorch."""

__all__ = ["RNNBidirectional"]

import torch
from torch import Tensor, nn

from torch_ref.layers.rnn import RNNDeep
from torch_ref.layers.state import State


class RNNBidirectional(nn.Module):
    """Two whole stacks, one of which runs backward in time, with joined outputs.

    The state is (h forward, h backward), each (num_layers, batch, hidden_features). With one layer,
    this is the same as torch's `bidirectional=True`. With more, each of torch's layers reads both
    directions of the layer below, whereas here it reads only its own.
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
