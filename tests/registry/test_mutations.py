"""Every planted fault is found by the check that should find it."""

import contextlib
import dataclasses

import pytest
from flax import nnx
from selection import CHECKED, COLLECTED

from parity_tests.checks import is_caught
from parity_tests.registry import CASES, MUTATIONS


# `test_locate_verdicts.py` tests the faults that have a culprit
@pytest.mark.slow
@pytest.mark.parametrize("mutation", [m for m in MUTATIONS if m.culprit is None], ids=str)
def test_is_caught(mutation):
    assert is_caught(mutation)


def test_every_fault_is_noticed_by_a_test():
    """A fault without a check is noticed by the comparison with the twin, which all cases have."""
    assert {(m.case, m.check) for m in MUTATIONS if m.check} <= {*COLLECTED}


@pytest.mark.slow
def test_every_kind_of_layer_is_checked():
    def kinds(names):
        return {type(m) for name in names for _, m in nnx.iter_modules(CASES[name].abstract())}

    assert kinds(CHECKED) == kinds(CASES)


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
