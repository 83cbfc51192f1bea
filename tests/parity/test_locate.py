"""A fault on purpose: the report must name the submodule that has it."""

import pytest

from parity_tests.engine.locate import find_departure
from parity_tests.registry import CASES, MUTATIONS


@pytest.mark.slow
@pytest.mark.parametrize("mutation", [m for m in MUTATIONS if m.culprit is not None], ids=str)
def test_a_fault_is_found_where_it_is(mutation):
    with mutation.plant():
        location = find_departure(CASES[mutation.case].problem(), "float64", {})
    assert location.culprit == mutation.culprit, f"\n{location}"


@pytest.mark.parametrize("name", ["HawkBlock", "RWKVLanguageModel", "GPModel of hyena"])
def test_no_fault_is_found_where_there_is_none(name):
    location = find_departure(CASES[name].problem(), "float32", {})
    assert location.culprit is None, f"\n{location}"
    assert str(location).endswith("first to depart: none, the forward pass agrees")
