"""Cases of torch.nn's recurrences, for the files of RNN, LSTM and GRU."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from jax_models.layers.recurrent import RecurrentStack
from parity_tests.registry.case import TIME, Case
from torch_ref.layers.torch_nn import run_recurrence

STACKS: dict[str, dict[str, Any]] = {
    "1 layer": {"num_layers": 1, "bidirectional": False},
    "2 layers": {"num_layers": 2, "bidirectional": False},
    "2 layers, both ways": {"num_layers": 2, "bidirectional": True},
}


def run_packed(twin, x, state=None, lengths=None):
    """Runs a recurrence of torch.nn, over packed rows if there are `lengths`."""
    if lengths is None:
        return run_recurrence(twin, x, state)
    x = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    packed: Any
    packed, last = run_recurrence(twin, x, state)
    y, _ = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True, total_length=TIME)
    return y, last


def torch_nn_cases(
    name: str, twin: Callable[..., nn.Module], layer: type[RecurrentStack], **options: Any
) -> list[Case]:
    """Cases of a torch.nn module and its JAX layer, with these options, one for each of `STACKS`.

    `test_torch_nn.py` tests random combinations of all options.
    """
    return [
        Case(
            f"torch.nn.{name}, {stack}",
            partial(twin, 5, 6, batch_first=True, **sizes),
            partial(layer, 5, 6, **sizes, **options),
            layout="torch.nn",
            architecture=layer.__name__.lower(),
            call=run_packed,
            packs=True,
        )
        for stack, sizes in STACKS.items()
    ]
