"""The report names the submodule that has a deliberate fault, in each framework."""

import re
from itertools import product

import pytest
import torch
from faulty_pairs import FAULTS, FRAMEWORKS, TOKENS, TorchModel

from parity_tests import Report, compare

pytestmark = pytest.mark.usefixtures("standard_promotion")


def report_of(framework, fault) -> Report:
    torch.manual_seed(0)
    function, weights = FRAMEWORKS[framework](fault)
    return compare(TorchModel(), function, TOKENS, weights=weights, dtypes=["float64"], locate=True)


EVERY = "NNX, as it is"
"""Every fault is planted in this framework, and two of them in each of the others."""
OTHERS = [name for name in FRAMEWORKS if name != EVERY]
CASES = [*product([EVERY], FAULTS), *product(OTHERS, ["another epsilon", "stopped gradient"])]


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "fault"), CASES)
def test_a_fault_is_found_in_each_framework(framework, fault):
    """A fault in the backward pass is found only if the forward pass agrees."""
    report = report_of(framework, fault)
    culprit, direction = FAULTS[fault]
    if framework == "NNX, nnx.scan":  # all blocks have the fault
        first = "blocks.0" if direction == "forward" else "blocks.1"
        culprit = culprit.replace("blocks.1", first)
    assert report.location.culprit == culprit, f"\n{report}"
    assert f"{culprit or 'the module itself'}, {direction}" in report.location.verdict
    if fault == "another epsilon" and framework in ("Linen", "Equinox", "haiku"):
        (hyperparameters,) = report.location.remarks
        expected = r"LayerNorm \| LayerNorm: eps 1e-05 \| eps(ilon)? 2e-05"
        assert re.fullmatch(expected, hyperparameters)


def test_a_pair_agrees_without_a_fault():
    report = report_of(EVERY, None)
    assert report.passed, f"\n{report}"
