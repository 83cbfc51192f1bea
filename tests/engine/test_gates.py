"""The report on an LSTM or GRU that departs says which of its gates do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from parity_tests import compare

pytestmark = pytest.mark.usefixtures("standard_promotion")
SIZE, X = 4, np.random.default_rng(0).standard_normal((3, 5, 2))


def gates_of(fault, w, x, h, count):
    """The preactivations of the gates: those of the input, and those of the state."""
    biases = {name: jnp.split(w[name], count) for name in ("bias_ih_l0", "bias_hh_l0")}
    if fault == "a bias of gate 1":
        biases["bias_ih_l0"][1] *= 0
    if fault == "the gradient of a bias":
        biases["bias_hh_l0"][-1] = jax.lax.stop_gradient(biases["bias_hh_l0"][-1])
    of_input, of_state = (
        [a + b for a, b in zip(jnp.split(y @ w[key].T, count, -1), biases[bias], strict=True)]
        for y, key, bias in ((x, "weight_ih_l0", "bias_ih_l0"), (h, "weight_hh_l0", "bias_hh_l0"))
    )
    return of_input, of_state


def lstm_step(fault, w, carry, x):
    h, c = carry
    i, f, g, o = map(jnp.add, *gates_of(fault, w, x, h, 4))
    if fault == "i, f, o, g":
        g, o = o, g
    sigmoid = jax.nn.sigmoid
    c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(g)
    h = sigmoid(o) * jnp.tanh(c)
    return (h, c), 2 * h if fault == "after" else h


def gru_step(fault, w, carry, x):
    h, c = carry
    (ir, iz, i_n), (hr, hz, hn) = gates_of(fault, w, x, h, 3)
    r, z = jax.nn.sigmoid(ir + hr), jax.nn.sigmoid(iz + hz)
    if fault == "z, r, n":
        r, z = z, r
    if fault == "reset before the product":
        n = jnp.tanh(i_n + (r * h) @ w["weight_hh_l0"][-SIZE:].T + w["bias_hh_l0"][-SIZE:])
    else:
        n = jnp.tanh(i_n + r * hn)
    h = z * n + (1 - z) * h if fault == "the update" else (1 - z) * n + z * h
    return (h, c), h


def run(step, fault, w, x):
    start = (jnp.zeros((len(x), SIZE), x.dtype),) * 2
    _, y = jax.lax.scan(lambda carry, x: step(fault, w, carry, x), start, x.swapaxes(0, 1))
    return y.swapaxes(0, 1)


FOLLOWS = "JAX computes all of them as torch does, and departs in what follows"
FAULTS = {
    (nn.LSTM, "a bias of gate 1"): "gates in step 1: i, g and o agree, f departs",
    (nn.LSTM, "i, f, o, g"): "gates: JAX uses the weights of i, f, o and g for i, f, g and o",
    (nn.LSTM, "after"): f"gates: {FOLLOWS}",
    (nn.LSTM, "the gradient of a bias"): "gradient of bias_hh_l0 departs in o alone",
    (nn.GRU, "a bias of gate 1"): "gates in step 1: r and n agree, z departs",
    (nn.GRU, "reset before the product"): "gates in step 1: r and z agree, n departs",
    (nn.GRU, "z, r, n"): "gates: JAX uses the weights of z, r and n for r, z and n",
    (nn.GRU, "the update"): f"gates in step 1: {FOLLOWS}",
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "fault"), FAULTS)
def test_the_gates_that_depart_are_named(kind, fault):
    torch.manual_seed(0)
    report = compare(
        kind(2, SIZE, batch_first=True),
        lambda w, x: run(lstm_step if kind is nn.LSTM else gru_step, fault, w, x),
        X,
        weights=dict,
        call_twin=lambda twin, x: twin(x)[0],
        dtypes="float64",
        locate=True,
    )
    assert FAULTS[kind, fault] in report.location.remarks, f"\n{report}"


@pytest.mark.slow
def test_all_gates_of_a_direction_may_depart():
    """The port runs both directions from the first step to the last."""
    torch.manual_seed(0)

    def port(w, x):
        reverse = {key: w[f"{key}_reverse"] for key in w if not key.endswith("_reverse")}
        return jnp.concatenate([run(lstm_step, "", each, x) for each in (w, reverse)], axis=-1)

    report = compare(
        nn.LSTM(2, SIZE, batch_first=True, bidirectional=True),
        port,
        X,
        weights=dict,
        call_twin=lambda twin, x: twin(x)[0],
        dtypes="float64",
        locate=True,
    )
    remark = "gates of layer 0, reverse in step 1: i, f, g and o depart"
    assert remark in report.location.remarks, f"\n{report}"


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "array"), [(1, np.array), (2, np.array), (2, jnp.asarray)])
def test_biases_of_float32_do_not_count_as_a_departure(rows, array):
    """Flax's cell keeps the sum of two biases in float32, and has no bias inside of n.

    With `jnp.asarray`, the function that makes the layer is traced, with the loops of its
    initialization, and its casts are ignored.
    """
    torch.manual_seed(0)
    twin = nn.GRU(2, SIZE, batch_first=True)
    for param in twin.parameters():
        nn.init.normal_(param)

    def port(weights):
        cell = nnx.GRUCell(2, SIZE, rngs=nnx.Rngs(0))
        for part, name in (cell.dense_i, "weight_ih_l0"), (cell.dense_h, "weight_hh_l0"):
            part.kernel[...] = array(weights[name]).T.astype("float32")
        of_r_and_z = array(weights["bias_hh_l0"]) * (np.arange(3 * SIZE) < 2 * SIZE)
        bias = array(weights["bias_ih_l0"]) + of_r_and_z
        cell.dense_i.bias[...] = bias.astype("float32")
        return nnx.RNN(cell)

    report = compare(
        twin,
        lambda layer, x: layer(x),
        X[:rows],
        weights=port,
        call_twin=lambda twin, x: twin(x)[0],
        dtypes="float64",
        locate=True,
    )
    remark = "gates in step 1: r and z agree, n departs"
    assert remark in report.location.remarks, f"\n{report}"


class Inherits(nn.LSTM):
    """Computes what torch's LSTM does."""


class LSTM(nn.LSTM):
    """Scales the outputs of torch's LSTM."""

    def forward(self, x):
        y, state = super().forward(x)
        return 1.5 * y, state


class GRUCell(nn.Module):
    """A minimal gated unit with a third gate, under the name and with the weights of torch's."""

    def __init__(self, features, hidden):
        super().__init__()
        self.weight_ih = nn.Parameter(torch.randn(3 * hidden, features))
        self.weight_hh = nn.Parameter(torch.randn(3 * hidden, hidden))

    def forward(self, x):
        f, n, o = (x @ self.weight_ih.T).chunk(3, -1)
        return torch.sigmoid(o) * (1 - torch.sigmoid(f)) * torch.tanh(n)


def scan_lstm(w, x):
    start = (jnp.zeros((len(x), SIZE), x.dtype),) * 2
    step = lambda carry, x: lstm_step("a bias of gate 1", w, carry, x)  # noqa: E731
    return jax.lax.scan(step, start, x.swapaxes(0, 1))[1].swapaxes(0, 1)


def run_cell(w, x):
    """Has an r and a z as torch's own cell does, and another n."""
    r, z, n = jnp.split(x @ w["weight_ih"].T, 3, -1)
    return (1 - jax.nn.sigmoid(z)) * jnp.tanh(n + jax.nn.sigmoid(r))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("twin", "port", "x", "remark"),
    [
        (
            lambda: Inherits(2, SIZE, batch_first=True),
            scan_lstm,
            X,
            "gates in step 1: i, g and o agree, f departs",
        ),
        (lambda: LSTM(2, SIZE, batch_first=True), scan_lstm, X, None),
        (lambda: GRUCell(2, SIZE), run_cell, X[:, 0], None),
    ],
    ids=["a subclass", "a subclass with its own forward", "another class"],
)
def test_only_what_runs_the_forward_of_torch_is_judged_by_its_equations(twin, port, x, remark):
    torch.manual_seed(0)

    def first(twin, x):
        y = twin(x)
        return y[0] if isinstance(y, tuple) else y

    report = compare(twin(), port, x, weights=dict, call_twin=first, dtypes="float64", locate=True)
    assert not report.passed
    remarks = [each for each in report.location.remarks if each.startswith("gates")]
    assert remarks == ([remark] if remark else []), f"\n{report}"
