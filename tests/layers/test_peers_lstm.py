"""Compares LSTMs with those of labml."""

import numpy as np
import pytest
import torch
from flax import nnx

from jax_models import LSTM, HyperLSTM, LayerNormLSTM, LSTMState, from_torch, to_torch
from jax_models.ops import HyperLSTMState
from parity_tests import assert_parity

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("peers")]


def inputs(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape)


def randomise(module: torch.nn.Module) -> None:
    """Draws all parameters, because some start as zero or as the identity."""
    rng = np.random.default_rng(0)
    for parameter in module.parameters():
        parameter.data = torch.from_numpy(rng.standard_normal(tuple(parameter.shape))).float()


def test_the_lstm_of_labml():
    original = pytest.importorskip("labml_nn.lstm").LSTM(5, 6, 3)
    sizes = {"num_layers": 3, "rngs": nnx.Rngs(0)}
    state = inputs(3, 4, 6), inputs(3, 4, 6) / 2
    assert_parity(
        original,
        LSTM(5, 6, recurrent_bias=False, time_major=True, **sizes),
        inputs(9, 4, 5),
        state,
        weights="labml",
        call=lambda layer, x, state: layer(x, LSTMState(*state)),
    )
    for recurrent_bias in (False, True):
        ours = LSTM(5, 6, recurrent_bias=recurrent_bias, **sizes)
        weights = to_torch(from_torch(ours, original.state_dict()), "labml")
        original.load_state_dict({key: torch.from_numpy(array) for key, array in weights.items()})


def test_the_layer_norm_lstm_of_labml():
    """The cell of labml runs one step."""
    original = pytest.importorskip("labml_nn.lstm").LSTMCell(5, 7, layer_norm=True)
    randomise(original)

    def call_twin(cell, x, state):
        outputs = []
        for x_t in x.unbind(1):
            state = cell(x_t, *state)
            outputs.append(state[0])
        return torch.stack(outputs, 1), state

    assert_parity(
        original,
        LayerNormLSTM(5, 7, rngs=nnx.Rngs(0)),
        inputs(4, 9, 5),
        (inputs(4, 7), inputs(4, 7) / 2),
        weights="labml",
        call=lambda layer, x, state: layer(x, LSTMState(*state)),
        call_twin=call_twin,
    )


def test_the_hyper_lstm_of_labml():
    """States are compared, too."""
    package = pytest.importorskip("labml_nn.hypernetworks.hyper_lstm")
    original = package.HyperLSTM(5, 7, 4, 3, 2)
    randomise(original)

    def call_twin(module, x, state):
        y, last = module(x, state)
        return y.swapaxes(0, 1), last

    assert_parity(
        original,
        HyperLSTM(5, 7, 4, 3, num_layers=2, rngs=nnx.Rngs(0)),
        inputs(6, 4, 5),
        tuple(inputs(2, 4, size) / 2 for size in (7, 7, 4, 4)),
        weights="labml",
        call=lambda layer, x, state: layer(x.swapaxes(0, 1), HyperLSTMState(*state)),
        call_twin=call_twin,
    )
