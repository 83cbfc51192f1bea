"""The classes of seed 003."""

from functools import partial

import torch

import torch_ref
from jax_models import HyperLSTM, LayerNormLSTM
from parity_tests.registry.case import Case


def call_cell(twin, x, state, lengths=None):
    """The LSTM cell of seed 003, one step at a time."""
    h, c = state or 2 * [x.new_zeros(x.shape[0], twin.hidden_lin.in_features)]
    ys = []
    for x_t in x.unbind(1):
        h, c = twin(x_t, h, c)
        ys.append(h)
    return torch.stack(ys, dim=1), (h, c)


def call_time_major(twin, x, state, lengths=None):
    """The time-major HyperLSTM of seed 003."""
    y, last = twin(x.transpose(0, 1), state)
    return y.transpose(0, 1), last


def hyper_lstm_cases() -> list[Case]:
    """The classes of seed 003."""
    return [
        Case(
            "LayerNormLSTM",
            partial(torch_ref.LayerNormLSTMCell, 5, 6),
            partial(LayerNormLSTM, 5, 6),
            layout="labml",
            call=call_cell,
        ),
        *(
            Case(
                f"HyperLSTM {num_layers} layer{'s' if num_layers > 1 else ''}",
                partial(torch_ref.HyperLSTM, 5, 6, 4, 3, n_layers=num_layers),
                partial(HyperLSTM, 5, 6, 4, 3, num_layers=num_layers),
                layout="labml",
                call=call_time_major,
            )
            for num_layers in (1, 2)
        ),
    ]
