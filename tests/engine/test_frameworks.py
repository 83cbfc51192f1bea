"""`compare` on models of Linen, Equinox, haiku and Keras, and on NNX modules that change."""

import re

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from faulty_pairs import TOKENS, TorchModel, of_equinox, of_haiku, of_keras, of_linen
from flax import nnx

from jax_models.weights import Weight, added, parts, same
from parity_tests import compare, compare_training
from parity_tests.engine.candidates.model_weights import merge, model_in_dtype, split
from parity_tests.engine.problem import Problem, call_model
from parity_tests.engine.results import Results
from parity_tests.engine.traces.frameworks import trace_jax

pytestmark = pytest.mark.usefixtures("standard_promotion")

FORMS = {
    of_linen: ("a pair", "a loader", "bound", "ToNNX"),
    of_equinox: ("a table", "a function of a model", "a loader"),
    of_haiku: ("a pair", "a loader", "a pair with state"),
    of_keras: ("a table", "a loader"),
}
"""The forms of a model, by framework. `make test` runs only the first of each."""


def compared(model, **options):
    torch.manual_seed(0)
    return compare(TorchModel(), model, TOKENS, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "form"), [(framework, form) for framework in FORMS for form in FORMS[framework]]
)
@pytest.mark.parametrize("fault", [None, "another epsilon"])
def test_models_of_other_frameworks(framework, form, fault):
    model, weights = framework(fault, form)
    report = compared(model, weights=weights, locate=True)
    assert report.passed == (fault is None), f"\n{report}"
    assert "weight gradients" in report.errors["float64"]
    if not report.passed:
        assert report.location.culprit == "blocks.1.norm", f"\n{report}"
    if not report.passed and framework is not of_keras:  # whose norm is the test's own
        (hyperparameters,) = report.location.remarks
        expected = r"LayerNorm \| LayerNorm: eps 1e-05 \| eps(ilon)? 2e-05"
        assert re.fullmatch(expected, hyperparameters)


@pytest.mark.parametrize("framework", [of_linen, of_equinox, of_keras])
def test_a_model_without_weights_has_others(framework):
    """Comparing its outputs would be meaningless."""
    model, _ = framework(None, FORMS[framework][0])
    with pytest.raises(ValueError, match=r"^weights: the model has other weights than the twin"):
        compared(model)
    with pytest.raises(TypeError, match=r"^weights: the model has no layout 'torch\.nn'"):
        compared(model, weights="torch.nn")


def test_a_model_that_has_the_weights_needs_no_table():
    twin, model = torch.nn.Linear(4, 3), nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    model.kernel[...] = jnp.asarray(twin.weight.detach().numpy().T)
    model.bias[...] = jnp.asarray(twin.bias.detach().numpy())
    x = np.random.default_rng(0).standard_normal((2, 4))
    report = compare(twin, model, x)
    assert report.passed, f"\n{report}"
    assert report.notes[0].startswith("weight gradients are not compared")
    assert not compare(twin, model, x, call=lambda model, x: 1.1 * model(x)).passed


def flax_lstm_rows(forget):
    """Rows for Flax's LSTM cell, with four kernels for each key, and biases that are sums."""
    inner = [f"cell.{gate}" for gate in ("ii", forget, "ig", "io")]
    outer = [f"cell.{gate}" for gate in ("hi", "hf", "hg", "ho")]
    return [
        parts([f"{gate}.kernel" for gate in inner], "weight_ih_l0"),
        parts([f"{gate}.kernel" for gate in outer], "weight_hh_l0"),
        Weight(
            tuple(f"{gate}.bias" for gate in outer),
            ("bias_ih_l0", "bias_hh_l0"),
            lambda a, b: tuple((a + b).reshape(4, -1)),
            lambda *gates: (np.concatenate(gates), 0 * np.concatenate(gates)),
            exact=False,
        ),
    ]


def nnx_rnn():
    return nnx.RNN(nnx.LSTMCell(3, 4, rngs=nnx.Rngs(0)))


def linen_rnn():
    module = linen.RNN(linen.LSTMCell(4))
    variables = module.init(jax.random.key(0), jnp.ones((1, 2, 3), jnp.float32))
    return (module, variables), flax_lstm_rows("if")


def equinox_scan():
    """A scan whose carry is float32, whatever dtype its weights have."""
    eqx = pytest.importorskip("equinox")

    class Scan(eqx.Module):
        cell: eqx.nn.LSTMCell

        def __call__(self, x):
            def step(carry, x_t):
                carry = self.cell(x_t, carry)
                return carry, carry[0]

            start = jnp.zeros(4, jnp.float32)
            return jax.vmap(lambda row: jax.lax.scan(step, (start, start), row)[1])(x)

    table = [
        *(same(f"cell.weight_{side}", f"weight_{side}_l0") for side in ("ih", "hh")),
        added("cell.bias", ("bias_ih_l0", "bias_hh_l0")),
    ]
    return Scan(eqx.nn.LSTMCell(3, 4, key=jax.random.key(0))), table


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: (nnx_rnn(), flax_lstm_rows("if_")), id="nnx.RNN"),
        pytest.param(linen_rnn, id="linen.RNN", marks=pytest.mark.slow),
        pytest.param(equinox_scan, id="equinox", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_x64_cannot_trace_is_compared_in_float64(build):
    model, table = build()
    twin = torch.nn.LSTM(3, 4, batch_first=True)
    x = np.random.default_rng(0).standard_normal((2, 5, 3))

    def report(factor, **options):
        call_twin = lambda twin, x: twin(factor * x)[0]  # noqa: E731
        return compare(twin, model, x, weights=table, call_twin=call_twin, **options)

    right = report(1)
    assert right.passed, f"\n{right}"
    groups = {"outputs", "input gradient", "weight gradients"}
    assert right.errors["float64"].keys() == groups
    assert any("is traced without x64" in note for note in right.notes)
    wrong = report(1 + 1e-9, dtypes="float64", locate=True)
    assert not wrong.errors["float64"]["outputs"].passed
    assert wrong.location.culprit == "", f"\n{wrong}"


class Writer(nnx.Module):
    """Writes into a float32 buffer, which raises an error for float64."""

    def __call__(self, x):
        return jax.lax.dynamic_update_slice(jnp.zeros((3, 5), jnp.float32), x, (1, 1))


class Written(nnx.Module):
    def __init__(self):
        self.linear, self.writer = nnx.Linear(3, 4, rngs=nnx.Rngs(0)), Writer()

    def __call__(self, x):
        return self.writer(self.linear(x))


def test_only_the_calls_of_the_program_that_ran_are_traced():
    """The attempt under x64 fails inside the writer, whose call is then not finished."""
    build = lambda state_dict, dtype: split(model_in_dtype(Written(), dtype))  # noqa: E731
    inputs = (np.ones((2, 3)),)
    problem = Problem(
        torch.nn.Identity(), build, call_model, to_torch=None, load=merge, inputs=inputs
    )
    oracle = Results({"outputs": {"y": np.ones((3, 5))}})
    for dtype in ("float64", "float32"):
        calls = trace_jax(problem, dtype, oracle).calls
        assert [(call.name, call.kind) for call in calls] == [
            ("", "run"),
            ("", "Written"),
            ("linear", "Linear"),
            ("writer", "Writer"),
        ]
        assert [call.parent for call in calls] == [None, calls[0], calls[1], calls[1]]


def test_a_model_that_x64_cannot_trace_is_trained_in_float64():
    twin, x = torch.nn.LSTM(3, 4, batch_first=True), np.random.default_rng(0).random((2, 5, 3))
    twin.bias_hh_l0.requires_grad_(False)  # the sum of two trained biases would move twice as fast

    def report(factor):
        return compare_training(
            twin,
            nnx_rnn(),
            [x, -x],
            loss=lambda model, x: (model(x) ** 2).mean(),
            loss_twin=lambda twin, x: (twin(factor * x)[0] ** 2).mean(),
            optimizer=lambda: optax.sgd(0.1),
            optimizer_twin=lambda twin: torch.optim.SGD(twin.parameters(), 0.1),
            weights=flax_lstm_rows("if_"),
            dtypes="float64",
        )

    assert report(1).passed
    assert report(1 + 1e-9).parting["float64"][0] == 1
