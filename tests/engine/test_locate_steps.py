"""Loops over a cell of torch.nn, which JAX runs as one layer over the sequence."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_models import GRU, LSTM, RNN
from jax_models.weights import linear, nested
from parity_tests import compare, draft_table

pytestmark = pytest.mark.usefixtures("standard_promotion")
nn = torch.nn
FEATURES, HIDDEN, STEPS = 4, 6, 3


class Loop(nn.Module):
    """A loop over a cell, and a linear layer of its outputs."""

    def __init__(self, cell: nn.Module):
        super().__init__()
        self.embed, self.cell = nn.Linear(2, FEATURES), cell
        self.head = nn.Linear(HIDDEN, 2)

    def forward(self, x):
        state: Any = None
        outputs = []
        for x_t in self.embed(x).unbind(1):
            state = self.cell(x_t, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return self.head(torch.stack(outputs, 1))


def half_stopped(array):
    """The same array with half its gradient."""
    return (array + jax.lax.stop_gradient(array)) / 2


class Port(nnx.Module):
    """The port, with functions that change what the layer takes and gives."""

    def __init__(self, layer, before=lambda x: x, after=lambda y: y):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Linear(2, FEATURES, rngs=rngs)
        self.rnn, self.head = layer(FEATURES, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, 2, rngs=rngs)
        self.before, self.after = before, after

    def __call__(self, x):
        y, _ = self.rnn(self.before(self.embed(x)))
        return self.head(self.after(y))


class Stopped(LSTM):
    """An LSTM that halves the gradient of a bias."""

    def sequence(self, x, state, rows):
        bias = self.cells[0].bias_hh
        self.cells[0].bias_hh = nnx.Param(half_stopped(bias.get_value()))
        result = super().sequence(x, state, rows)
        self.cells[0].bias_hh = bias
        return result


def rolled(row):
    """The row with the gates in another order."""
    return row._replace(
        to_jax=lambda a: row.to_jax(jnp.roll(a, HIDDEN, axis=0)),
        to_torch=lambda a: (jnp.roll(*row.to_torch(a), -HIDDEN, axis=0),),
    )


def compared(cell: nn.Module, port: Port, change_row=lambda row: row):
    """The report of a loop over the cell, whose batch is as large as its number of steps."""
    torch.manual_seed(0)
    x = np.random.default_rng(0).standard_normal((STEPS, STEPS, 2))
    rows = map(change_row, port.rnn.torch_layouts()["torch.nn.cell"])
    table = [*linear("embed", "embed"), *nested([*rows], "rnn", "cell"), *linear("head", "head")]
    return compare(Loop(cell), port, x, weights=table, locate=True, dtypes="float64")


KINDS = {
    "LSTM": (nn.LSTMCell, LSTM),
    "GRU without bias": (partial(nn.GRUCell, bias=False), partial(GRU, use_bias=False)),
    "RNN of relu": (
        partial(nn.RNNCell, nonlinearity="relu"),
        partial(RNN, nonlinearity="relu"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_computes_what_a_loop_over_a_cell_does(kind):
    cell, layer = KINDS[kind]
    module, port = Loop(cell(FEATURES, HIDDEN)), Port(layer)
    report = compared(module.cell, port)
    assert report.passed, str(report)
    row = '*nested(model.rnn.torch_layouts()["torch.nn.cell"], "rnn", "cell"),'
    drafted = draft_table(module, port)
    assert row in drafted
    assert "#" not in drafted


FAULTS = {
    "the module itself, forward, after embed, before cell": {"before": lambda x: 1.1 * x},
    "the module itself, forward, after cell in call 3 of 3": {"after": lambda y: 1.1 * y},
    "the module itself, backward, after the backward pass of cell in call 1 of 3": {
        "before": half_stopped
    },
    (
        "the module itself, backward, after the backward pass of head, before the backward pass of "
        "cell"
    ): {"after": half_stopped},
    "cell in call 1 of 3, backward": {"layer": Stopped},
    "cell in call 1 of 3, forward": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("verdict", FAULTS)
def test_the_fault_is_found_in_the_loop_or_in_the_cell(verdict):
    """The last one is an error of the weight table, which exchanges gates."""
    port = Port(**{"layer": LSTM, **FAULTS[verdict]})
    change_row = {} if FAULTS[verdict] else {"change_row": rolled}
    report = compared(nn.LSTMCell(FEATURES, HIDDEN), port, **change_row)
    assert not report.passed
    assert report.location is not None
    assert report.location.verdict.startswith(verdict)
