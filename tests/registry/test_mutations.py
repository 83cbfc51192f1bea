"""Every planted fault is found by the check that should find it, and some where they are."""

import contextlib
import dataclasses

import pytest
from flax import nnx
from selection import CHECKED, COLLECTED, LOCATED

from jax_models import SequenceLayer
from parity_tests.checks import is_caught
from parity_tests.engine.locate.find import find_departure
from parity_tests.engine.references.torch_reference import TorchReference
from parity_tests.registry import CASES, MUTATIONS
from parity_tests.registry.mutation import DOCUMENTS, PADDING


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutation",
    [
        # The faults of a case share a process and the results of its twin.
        pytest.param(m, marks=pytest.mark.xdist_group(m.case), id=str(m))
        for m in MUTATIONS
        if m not in LOCATED
    ],
)
def test_is_caught(mutation):
    assert is_caught(mutation)


def departure(case, dtype, *, is_forward=False):
    problem = CASES[case].problem()
    traced = TorchReference(problem.twin).run(problem).runs.trace(dtype, is_forward=is_forward)
    return find_departure(problem, traced, {}, is_forward=is_forward)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("mutation", LOCATED, ids=str)
def test_a_fault_of_the_registry_is_found_where_it_is(mutation):
    with mutation.plant():
        location = departure(mutation.case, "float64", is_forward=True)
    assert location.culprit == mutation.culprit, f"\n{location}"


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", ["HawkBlock", "RWKVLanguageModel"])
def test_no_fault_is_found_where_there_is_none(name):
    location = departure(name, "float32")
    assert location.culprit is None, f"\n{location}"
    assert str(location).endswith("first to depart: none, all that was compared agrees")


def test_every_fault_is_noticed_by_a_test():
    """A fault without a check is noticed by the comparison with the twin, which all cases have."""
    assert {(m.case, m.check) for m in MUTATIONS if m.check} <= {*COLLECTED}


@pytest.mark.slow
def test_every_kind_of_layer_is_checked():
    def kinds(names):
        return {type(m) for name in names for _, m in nnx.iter_modules(CASES[name].abstract())}

    assert kinds(CHECKED) == kinds(CASES)
    for check in (PADDING, DOCUMENTS):
        checked = kinds(name for name, each in COLLECTED if each == check)
        assert {kind for kind in kinds(CASES) if issubclass(kind, SequenceLayer)} <= checked


@pytest.mark.slow
@pytest.mark.parametrize("check", [None, "steps equal sequence"])
def test_a_harmless_change_is_not_caught(check):
    harmless = dataclasses.replace(
        MUTATIONS[0], plant=contextlib.nullcontext, check=check, dtypes=("float64",)
    )
    assert not is_caught(harmless)


def architectures(cases) -> set[str]:
    return {type(CASES[case].abstract()).__name__ for case in cases}


@pytest.mark.slow
def test_every_architecture_departs_from_its_twin_by_a_fault():
    compared = {m.case for m in MUTATIONS if m.check is None}
    assert architectures(compared) == architectures(CASES)
    assert len({str(m) for m in MUTATIONS}) == len(MUTATIONS), "two have one name"
