"""Every check over every row of the registry."""

import functools

import numpy as np
import pytest

from parity_tests.cases import CASES, TIME
from parity_tests.checks import CHECKS, Subject
from parity_tests.measure import Report, measure
from parity_tests.problem import problem


@functools.lru_cache(maxsize=1)
def subject(name: str) -> Subject:
    return Subject(CASES[name])


def assert_within_bounds(report: Report) -> None:
    assert report.passed, f"\n{report}"


def rows(names):
    """A test parameter for each row; the tests of one row share a process, and what it compiled."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in names]
    )


@rows(CASES)
def test_agrees_with_twin(name):
    assert_within_bounds(measure(problem(CASES[name])))


@rows(name for name, case in CASES.items() if case.packs)
def test_agrees_with_twin_on_rows_of_several_lengths(name):
    lengths = np.array([3, TIME, 1])
    padded = problem(CASES[name], given_state=False, lengths=lengths)
    assert_within_bounds(measure(padded, ["float64"]))


@rows(CASES)
@pytest.mark.parametrize("check", CHECKS)
def test_holds(name, check):
    CHECKS[check](subject(name))
