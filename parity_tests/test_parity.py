"""Every check over every row of the registry."""

import functools

import numpy as np
import pytest

from parity_tests.cases import CASES, TIME
from parity_tests.checks import CHECKS, Subject
from parity_tests.compare import measure, problem


@functools.lru_cache(maxsize=1)
def subject(name: str) -> Subject:
    return Subject(CASES[name])


def assert_within_bounds(measured) -> None:
    """Assert that every group of every dtype is within its bound."""
    failed = {
        f"{dtype} {group}": error
        for dtype, groups in measured.items()
        for group, error in groups.items()
        if not error.passed
    }
    assert not failed


def rows(names):
    """A test parameter for each row; the tests of one row share a process, and what it compiled."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in names]
    )


@rows(CASES)
def test_agrees_with_twin(name):
    assert_within_bounds(measure(problem(CASES[name])))


@rows(CASES)
def test_agrees_with_twin_from_its_own_zero_state(name):
    """On rows of several lengths where the twin takes them."""
    case = CASES[name]
    lengths = np.array([3, TIME, 1]) if case.packs else None
    assert_within_bounds(measure(problem(case, given_state=False, lengths=lengths), ["float64"]))


@rows(CASES)
@pytest.mark.parametrize("check", CHECKS)
def test_holds(name, check):
    CHECKS[check](subject(name))
