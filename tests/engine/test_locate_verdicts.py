"""The report names the culprit, or says that there is none or that it is unknown."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
import torch
from faulty_pairs import Parts, TorchParts, X, located

from parity_tests import compare, tap
from parity_tests.engine.locate.location import Location, Visit
from parity_tests.engine.traces.torch_trace import trace_torch

pytestmark = pytest.mark.usefixtures("standard_promotion")


def test_a_dtype_inside_is_no_fault_if_the_results_have_theirs():
    location = located(
        {"call": lambda m, x: m.a(x).sum() * x, "a": lambda x: x.round()},
        {"call": lambda m, x: m.a(x).sum() * x, "a": lambda x: x.round().astype(jnp.float32)},
        X,
    )
    assert location is None


def test_a_module_that_raises_is_named():
    model = Parts(lambda m, x: m.a(x), a=lambda x: x @ x)
    with pytest.raises(TypeError) as found:
        compare(TorchParts(lambda m, x: m.a(x), a=lambda x: x @ x.T), model, X, locate=True)
    assert found.value.__notes__[-1] == "in JAX's a"


def test_nothing_compared_is_not_agreement():
    """The function has no counterparts of the submodules, so nothing can be compared."""
    twin = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    report = compare(
        twin,
        lambda w, x: (
            1.5 * (x @ (w["0.weight"].T @ w["1.weight"].T))
            + w["1.bias"]
            + w["0.bias"] @ w["1.weight"].T
        ),
        X,
        weights=dict,
        dtypes=["float64"],
        locate=True,
    )
    assert report.location.verdict.startswith(("not known", "0,")), f"\n{report}"


def test_a_tap_does_nothing_outside_of_a_comparison():
    assert tap("a", X) is X
    with pytest.raises(TypeError, match=r"^name: expected the name of a torch submodule, got 3"):
        tap(3, X)


def test_gradients_are_computed_only_where_a_departure_may_be_in_them(monkeypatch):
    """A fault in the results is located by forward passes alone, at less than half the cost."""
    traced = []

    def kept(*args, **kwargs):
        traced.append(trace_torch(*args, **kwargs))
        return traced[-1]

    monkeypatch.setattr("parity_tests.engine.references.torch_reference.trace_torch", kept)
    twin = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))

    def model(weights, x, forward, backward):
        h = jnp.tanh(tap("0", x @ weights["0.weight"].T + weights["0.bias"]))
        h = h + backward * (h - jax.lax.stop_gradient(h)) + forward
        return h @ weights["2.weight"].T + weights["2.bias"]

    for fault in ((0.1, 0.0), (0.0, 0.1)):
        port = partial(model, forward=fault[0], backward=fault[1])
        location = compare(twin, port, X[0], weights=dict, locate=True).location
        assert f", {'forward' if fault[0] else 'backward'}" in str(location)
    sizes = [
        sum(a.size for call in run.calls for a in call.slots["output gradients"].values())
        for run in traced
    ]
    assert sizes[0] == 0 < sizes[-1]
    assert ["weight gradients" in run.results for run in traced] == [bool(size) for size in sizes]


def test_successive_calls_that_agree_share_a_row():
    """Both cells of a loop, whose third step departs; backward, the last call comes first."""
    visits = [
        Visit(cell, cell, step * 1e-16, None, departs=step == 3, number=step)
        for step in (1, 2, 3)
        for cell in ("a", "b")
    ]
    *rows, _ = str(Location("float64", tuple(visits), "b", "b in call 3 of 3")).splitlines()
    names = ["a, calls 1 to 2", "b, calls 1 to 2", "a, call 3", "b, call 3"]
    assert [row[:18].strip() for row in rows[1:]] == names
    assert rows[1].split()[5:] == ["2.0e-16", "–", "a"]
    *rows, _ = str(Location("float64", tuple(visits[3::-1]), None, "")).splitlines()
    assert [row[:18].strip() for row in rows[1:]] == names[1::-1]
