"""Locates faults with a record, or a JAX model, as the reference."""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from faulty_pairs import (
    FAULTS,
    FRAMEWORKS,
    TOKENS,
    Parts,
    TorchModel,
    TorchParts,
    X,
    logistic,
    reordered_logistic,
)
from flax import nnx
from jax import lax
from test_locate_matching import PARTS

from parity_tests import assert_parity, compare, record, tap
from parity_tests.engine.references.open_reference import open_reference
from parity_tests.engine.traces.reference_trace import ReferenceTrace, largest_errors
from parity_tests.engine.traces.trace import SLOTS

pytestmark = pytest.mark.usefixtures("standard_promotion", "two_rounded_runs")


@pytest.fixture
def two_rounded_runs(monkeypatch):
    """Rounds twice at random instead of eight times, because JAX runs operation by operation."""
    monkeypatch.setattr("parity_tests.engine.references.reference.ROUNDED_RUNS", 2)


class Faulty(NamedTuple):
    twin: object
    model: object
    weights: object
    inputs: np.ndarray
    culprit: str
    dtype: str = "float64"


def of_parts(name):
    """A model whose part `a` is wrong."""
    torch_side, jax_side, (x,), _ = PARTS[name]
    return Faulty(TorchParts(**torch_side), Parts(**jax_side), None, x, "a")


def after_what_rounding_explains():
    call = lambda m, x: m.b(m.a(x))  # noqa: E731
    return Faulty(
        TorchParts(call, a=logistic, b=lambda x: x**2),
        Parts(call, a=reordered_logistic, b=lambda x: 2 * x**2),
        None,
        np.random.default_rng(0).uniform(0.1, 0.9, (7,)),
        "b",
        "float32",
    )


def planted(fault, framework="NNX, as it is", **fields):
    model, weights = FRAMEWORKS[framework](fault)
    return Faulty(TorchModel(), model, weights, TOKENS, FAULTS[fault][0], **fields)


PAIRS = {
    "forward": partial(planted, "first instead of mean"),
    "backward": partial(planted, "stopped gradient"),
    "backward, with taps": partial(planted, "gelu's gradient", "function with taps"),
    "forward in float32": partial(planted, "gelu by tanh", dtype="float32"),
    "after what rounding explains": after_what_rounding_explains,
    "shape": partial(of_parts, "a shape"),
    "dtype": partial(of_parts, "a dtype"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_a_record_names_the_culprit_that_the_torch_module_names(name, tmp_path):
    twin, model, weights, inputs, culprit, dtype = PAIRS[name]()
    path = tmp_path / "twin.safetensors"
    record(twin, inputs, path=path, dtypes=dtype)
    there = compare(path, model, weights=weights, locate=True).location
    here = compare(twin, model, inputs, weights=weights, dtypes=dtype, locate=True).location
    assert there.culprit == culprit, f"\n{there}"
    assert there == here


def traces_of(source, *inputs) -> list[ReferenceTrace]:
    """The traces of a reference, by dtype."""
    with open_reference(source) as reference:
        problem = reference.make_problem(inputs, dtypes=["float64", "bfloat16"])
        reference.run(problem)
        return [reference.runs.trace(dtype) for dtype in problem.dtypes]


class Perceptron(nnx.Module):
    """A small model, because JAX runs one operation at a time when its calls are traced."""

    def __init__(self, fault=""):
        rngs, epsilon = nnx.Rngs(0), 1e-5 if fault == "inside" else 1e-6
        self.first = nnx.LayerNorm(4, epsilon=epsilon, rngs=rngs)
        self.last = nnx.Linear(4, 4, rngs=rngs)
        self.fault = fault

    def __call__(self, x):
        h = jnp.tanh(self.first(x))
        if self.fault == "backward":
            h = 0.5 * (h + lax.stop_gradient(h))
        return self.last((1.5 if self.fault == "forward" else 1) * h)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "inputs"),
    [(TorchModel, TOKENS), (Perceptron, X)],
)
def test_a_record_tells_what_its_side_tells(make, inputs, tmp_path):
    side, path = make(), tmp_path / "side.safetensors"
    record(side, inputs, path=path, dtypes=["float64", "bfloat16"])
    for live, recorded in zip(traces_of(side, inputs), traces_of(path), strict=True):
        assert recorded.own_run().dtypes == live.own_run().dtypes
        assert {p: e for p, e in recorded.own_run().errors.items() if e} == {
            p: e for p, e in live.own_run().errors.items() if e
        }
        scatters = [largest_errors(each.rounded_errors()) for each in (live, recorded)]
        there, here = ({p: e for p, e in scatter.items() if e} for scatter in scatters)
        assert there == here != {}
        assert recorded.owners == live.owners
        for call, again in zip(live.trace.calls, recorded.trace.calls, strict=True):
            for field in ("name", "kind", "index", "weights"):
                assert getattr(again, field) == getattr(call, field)
            assert [c.index for c in again.ancestors] == [c.index for c in call.ancestors]
            assert {c.index for c in again.sources} == {c.index for c in call.sources}
            for slot in SLOTS:
                assert [*again.slots[slot]] == [*call.slots[slot]]
                for label, array in call.slots[slot].items():
                    np.testing.assert_array_equal(again.slots[slot][label], array)


def test_what_is_told_is_not_rounded():
    trace, *_ = traces_of(lambda x: tap("a", x), X)
    scatter = largest_errors(trace.rounded_errors())
    assert (1, "outputs", "") in scatter
    assert not any(scatter.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "culprit", "verdict"),
    [
        ("inside", "first", "first, forward"),
        ("forward", "", ", forward, after first"),
        ("backward", "", ", backward, after the backward pass of last"),
    ],
)
def test_a_jax_model_is_a_reference(fault, culprit, verdict, tmp_path):
    path, model = tmp_path / "model.safetensors", Perceptron(fault)
    record(Perceptron(), X, path=path, dtypes="float64")
    live = compare(Perceptron(), model, X, dtypes="float64", locate=True).location
    assert live.culprit == culprit, f"\n{live}"
    assert verdict in live.verdict
    recorded = compare(path, model, locate=True).location
    assert (recorded.culprit, recorded.verdict) == (live.culprit, live.verdict)


@pytest.mark.slow
def test_a_record_without_activations_is_not_located(tmp_path):
    twin, model, weights, tokens, *_ = planted("gelu by tanh")
    small, large = tmp_path / "small.safetensors", tmp_path / "large.safetensors"
    record(twin, tokens, path=large)
    record(twin, tokens, path=small, activations=False)
    assert small.stat().st_size < large.stat().st_size
    with pytest.raises(ValueError, match=r"^locate: the record has no activations, record"):
        compare(small, model, weights=weights, locate=True)
    for path, is_located in ((small, False), (large, True)):
        with pytest.raises(AssertionError) as error:
            assert_parity(path, model, weights=weights)
        assert ("first to depart: blocks.1.act" in str(error.value)) == is_located
    with pytest.raises(ValueError, match=r"names: expected torch submodules .embed, .*, got 'x'"):
        compare(large, model, weights=weights, names={"x": "embed"})
