"""Calls torch.nn's recurrences with the interface of this package's layers."""

from torch import Tensor, nn

from torch_ref.layers.state import State


def run_recurrence(rnn: nn.Module, x, state: State | None = None) -> tuple[Tensor, State]:
    """Runs `rnn(x, state) -> (y, state)` for any recurrent module, including torch.nn's.

    Modules of torch.nn must have `batch_first=True`. The state of torch.nn.RNN and GRU is a tensor
    there, and a tuple of one tensor here.
    """
    if not isinstance(rnn, nn.RNN | nn.GRU):
        return rnn(x, state)
    y, h = rnn(x, None if state is None else state[0])
    return y, (h,)
