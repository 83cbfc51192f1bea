"""`compare` on models of Linen, Equinox, haiku and Keras, and on NNX modules that change."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from faulty_pairs import TOKENS, TorchModel, equinox_pair, haiku_pair, keras_pair, linen_pair
from flax import nnx

from jax_models.weights import added, transposed
from parity_tests import compare, compare_training
from parity_tests.engine.candidates.model_weights import merge, model_in_dtype, split
from parity_tests.engine.problem import Problem, call_model
from parity_tests.engine.results import Results
from parity_tests.engine.traces.frameworks import trace_jax

pytestmark = pytest.mark.usefixtures("standard_promotion")

FORMS = {
    linen_pair: ("a pair", "a loader", "bound", "ToNNX"),
    equinox_pair: ("a table", "a function of a model", "a loader"),
    haiku_pair: ("a pair", "a loader", "a pair with state"),
    keras_pair: ("a table", "a loader"),
}
"""The forms of a model, by framework."""


def compared(model, **options):
    torch.manual_seed(0)
    return compare(TorchModel(), model, TOKENS, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "form"), [(framework, form) for framework in FORMS for form in FORMS[framework]]
)
def test_models_of_other_frameworks(framework, form):
    model, weights = framework(None, form)
    dtypes = ["float64", "float32"] if form == FORMS[framework][0] else ["float64"]
    report = compared(model, weights=weights, dtypes=dtypes)
    assert report.passed, f"\n{report}"
    assert "weight gradients" in report.errors["float64"]


@pytest.mark.slow
def test_a_model_without_weights_has_others():
    """Comparing its outputs would be meaningless."""
    model, _ = linen_pair(None)
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


def flax_rnn_rows(inner, outer):
    """Rows of a cell of Flax, whose bias is the sum of torch's two."""
    return [
        transposed(f"cell.{inner}.kernel", "weight_ih_l0"),
        transposed(f"cell.{outer}.kernel", "weight_hh_l0"),
        added(f"cell.{inner}.bias", ("bias_ih_l0", "bias_hh_l0")),
    ]


def nnx_rnn():
    cell = nnx.SimpleCell(3, 4, dtype=None, rngs=nnx.Rngs(0))
    return nnx.RNN(cell), flax_rnn_rows("dense_i", "dense_h")


def linen_rnn():
    module = linen.RNN(linen.SimpleCell(4))
    variables = module.init(jax.random.key(0), jnp.ones((1, 2, 3), jnp.float32))
    return (module, variables), flax_rnn_rows("i", "h")


@pytest.mark.parametrize("build", [nnx_rnn, pytest.param(linen_rnn, marks=pytest.mark.slow)])
def test_a_model_that_x64_cannot_trace_is_compared_in_float64(build):
    model, table = build()
    twin = torch.nn.RNN(3, 4, batch_first=True)
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
    twin, x = torch.nn.RNN(3, 4, batch_first=True), np.random.default_rng(0).random((2, 5, 3))
    model, table = nnx_rnn()
    twin.bias_hh_l0.requires_grad_(False)  # the sum of two trained biases would move twice as fast

    def report(factor):
        return compare_training(
            twin,
            model,
            [x, -x],
            loss=lambda model, x: (model(x) ** 2).mean(),
            loss_twin=lambda twin, x: (twin(factor * x)[0] ** 2).mean(),
            optimizer=lambda: optax.sgd(0.1),
            optimizer_twin=lambda twin: torch.optim.SGD(twin.parameters(), 0.1),
            weights=table,
            dtypes="float64",
        )

    assert report(1).passed
    assert report(1 + 1e-9).parting["float64"][0] == 1
