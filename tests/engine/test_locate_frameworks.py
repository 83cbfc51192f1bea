"""The report names the submodule that has a deliberate fault, in each framework."""

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
"""The quick tests plant every fault in this framework, and one fault in each of the others.

That fault is in the backward pass, so it is found only if the forward pass agrees."""


@pytest.mark.parametrize(
    ("framework", "fault"),
    [
        pytest.param(framework, fault, marks=[] if framework == EVERY else pytest.mark.slow)
        for framework in FRAMEWORKS
        for fault in FAULTS
    ],
)
def test_a_fault_is_found_in_each_framework(framework, fault):
    report = report_of(framework, fault)
    culprit, direction = FAULTS[fault]
    if framework == "NNX, nnx.scan":  # all blocks have the fault
        first = "blocks.0" if direction == "forward" else "blocks.1"
        culprit = culprit.replace("blocks.1", first)
    assert report.location.culprit == culprit, f"\n{report}"
    assert f"{culprit or 'the module itself'}, {direction}" in report.location.verdict


@pytest.mark.parametrize(
    "framework",
    [each if each == EVERY else pytest.param(each, marks=pytest.mark.slow) for each in FRAMEWORKS],
)
def test_the_pairs_agree_without_a_fault(framework):
    report = report_of(framework, None)
    assert report.passed, f"\n{report}"
