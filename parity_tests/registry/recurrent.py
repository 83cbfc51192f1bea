"""The classes of seeds 001 and 004, and torch.nn's recurrences."""

from functools import partial, partialmethod

import torch
from torch import nn

import torch_ref
from jax_models import GRU, LSTM, RNN, Bidirectional
from jax_models.layers.recurrent import RecurrentStack
from parity_tests.registry.case import TIME, Case


def call_torch_nn(twin, x, state, lengths=None):
    """torch.nn.RNN, LSTM, GRU with `batch_first`."""
    if lengths is not None:
        x = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    if state is not None:
        state = state if isinstance(twin, nn.LSTM) else state[0]
    y, last = twin(x, state)
    if lengths is not None:
        y, _ = nn.utils.rnn.pad_packed_sequence(y, batch_first=True, total_length=TIME)
    return y, last if isinstance(last, tuple) else (last,)


def call_scratch(twin, x, state, lengths=None):
    """The time-major classes of seed 001, their states (layers, batch, features)."""
    y, last = twin(x.transpose(0, 1), *(state or ()))
    return y.transpose(0, 1), last if isinstance(last, tuple) else (last,)


def call_two_stacks(twin, x, state, lengths=None):
    """RNNBidirectional: its states are forward and backward by turns, ours one after the other."""
    h0 = None if state is None else torch.stack(state, dim=1).flatten(0, 1)
    y, last = twin(x.transpose(0, 1), h0)
    return y.transpose(0, 1), (last[0::2], last[1::2])


def call_cell(twin, x, state, lengths=None):
    """The time-major RNN of seed 004: its state has no axis of layers."""
    y, last = twin(x.transpose(0, 1), None if state is None else state[0][0])
    return y.transpose(0, 1), (last[None],)


def two_stacks(num_layers: int, **kwargs) -> Bidirectional:
    """RNNBidirectional's layer."""
    return Bidirectional(
        *(RNN(5, 6, num_layers=num_layers, **kwargs) for _ in ("forward", "backward"))
    )


def joined_form(layer: type[RecurrentStack]) -> type[RecurrentStack]:
    """The layer with x and h multiplied together, whatever `ops.recurrence` would choose."""
    members = {"recurrence": partialmethod(layer.recurrence, method="joined")}
    return type(layer.__name__, (layer,), {"__module__": layer.__module__, **members})


def seed_cases() -> list[Case]:
    """The classes of seeds 001 and 004."""
    scratch = partial(Case, layout="scratch", call=call_scratch)
    return [
        scratch("RNNScratch tanh", partial(torch_ref.RNNScratch, 5, 6), partial(RNN, 5, 6)),
        scratch(
            "RNNScratch relu",
            partial(torch_ref.RNNScratch, 5, 6, nonlinearity="relu"),
            partial(RNN, 5, 6, nonlinearity="relu"),
        ),
        scratch(
            "RNNScratch no bias",
            partial(torch_ref.RNNScratch, 5, 6, bias=False),
            partial(RNN, 5, 6, use_bias=False),
        ),
        Case(
            "RNNDeep",
            partial(torch_ref.RNNDeep, 5, 6, num_layers=3),
            partial(RNN, 5, 6, num_layers=3),
            layout="deep",
            call=call_scratch,
        ),
        Case(
            "RNNBidirectional 1 layer",
            partial(torch_ref.RNNBidirectional, 5, 6),
            partial(two_stacks, 1),
            layout="deep",
            call=call_two_stacks,
        ),
        Case(
            "RNNBidirectional 3 layers",
            partial(torch_ref.RNNBidirectional, 5, 6, num_layers=3),
            partial(two_stacks, 3),
            layout="deep",
            call=call_two_stacks,
        ),
        Case(
            "RNN U W b",
            partial(torch_ref.RNN, 5, 6),
            partial(RNN, 5, 6, recurrent_bias=False),
            layout="cell",
            call=call_cell,
        ),
        scratch("LSTMScratch", partial(torch_ref.LSTMScratch, 5, 6), partial(LSTM, 5, 6)),
        scratch(
            "LSTMScratch no bias",
            partial(torch_ref.LSTMScratch, 5, 6, bias=False),
            partial(LSTM, 5, 6, use_bias=False),
        ),
        scratch(
            "LSTMProj",
            partial(torch_ref.LSTMProj, 5, 6, 4),
            partial(LSTM, 5, 6, proj_features=4, proj_bias=True),
        ),
        scratch(
            "LSTMProj no bias",
            partial(torch_ref.LSTMProj, 5, 6, 4, bias=False),
            partial(LSTM, 5, 6, proj_features=4, use_bias=False),
        ),
        scratch("GRUScratch", partial(torch_ref.GRUScratch, 5, 6), partial(GRU, 5, 6)),
        scratch(
            "GRUScratch no bias",
            partial(torch_ref.GRUScratch, 5, 6, bias=False),
            partial(GRU, 5, 6, use_bias=False),
        ),
    ]


def torch_nn_cases() -> list[Case]:
    """torch.nn.RNN, LSTM and GRU; `test_torch_nn.py` draws all their other options together."""
    families = {
        "RNN tanh": (nn.RNN, RNN, {"nonlinearity": "tanh"}, {"nonlinearity": "tanh"}),
        "RNN relu": (nn.RNN, RNN, {"nonlinearity": "relu"}, {"nonlinearity": "relu"}),
        "LSTM": (nn.LSTM, LSTM, {}, {"implementation": "xla"}),
        "LSTM proj": (nn.LSTM, LSTM, {"proj_size": 4}, {"proj_features": 4}),
        "GRU": (nn.GRU, GRU, {}, {}),
    }
    stacks = {
        "1 layer": {"num_layers": 1, "bidirectional": False},
        "2 layers": {"num_layers": 2, "bidirectional": False},
        "2 layers, both ways": {"num_layers": 2, "bidirectional": True},
    }
    torch_nn = partial(Case, layout="torch.nn", call=call_torch_nn, packs=True)
    by_xla = [
        torch_nn(
            f"torch.nn.{family}, {name}",
            partial(twin, 5, 6, batch_first=True, **stack, **twin_options),
            partial(layer, 5, 6, **stack, **options),
        )
        for family, (twin, layer, twin_options, options) in families.items()
        for name, stack in stacks.items()
    ]
    joined = [
        torch_nn(
            f"torch.nn.{family} joined, 1 layer",
            partial(twin, 5, 6, batch_first=True, **twin_options),
            partial(joined_form(layer), 5, 6, **options),
        )
        for family, (twin, layer, twin_options, options) in families.items()
        if family != "RNN relu"
    ]
    by_cudnn = [
        torch_nn(
            f"torch.nn.LSTM, {name} by cuDNN",
            partial(nn.LSTM, 5, 6, batch_first=True, **stack),
            partial(LSTM, 5, 6, **stack, implementation="cudnn"),
            dtypes=("float32",),
            platforms=("gpu",),
        )
        for name, stack in stacks.items()
    ]
    return by_xla + joined + by_cudnn
