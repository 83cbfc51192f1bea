"""torch.nn's recurrences by the contract of this package's layers."""

from torch import Tensor, nn

from torch_ref.layers.state import State


def run_recurrence(rnn: nn.Module, x, state: State | None = None) -> tuple[Tensor, State]:
    """`rnn(x, state) -> (y, state)` of any recurrent module, torch.nn's too, with `batch_first`.

    torch.nn.RNN and GRU have a tensor as their state, which is a tuple of one here.
    """
    if not isinstance(rnn, nn.RNN | nn.GRU):
        return rnn(x, state)
    y, h = rnn(x, None if state is None else state[0])
    return y, (h,)
