"""A module that runs from the last step to the first, in plain PyTorch."""

__all__ = ["Reversed"]

from torch import Tensor, nn

from torch_ref.layers.state import State
from torch_ref.layers.torch_nn import run_recurrence


class Reversed(nn.Module):
    """`y = reverse(layer(reverse(x)))` for any recurrent module."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        y, state = run_recurrence(self.layer, x.flip(1), state)
        return y.flip(1), state
