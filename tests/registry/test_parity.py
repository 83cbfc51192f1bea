"""The cases of the registry against their twins, and the checks on the layers."""

import functools

import numpy as np
import pytest
import torch
from selection import COLLECTED

import torch_ref
from parity_tests.checked_layer import CheckedLayer
from parity_tests.checks import CHECKS
from parity_tests.engine.problem import Problem, available_platforms
from parity_tests.engine.references.torch_reference import TorchReference
from parity_tests.engine.verdict.measure import measure
from parity_tests.engine.verdict.measure_twin import measure_twin
from parity_tests.engine.verdict.report import Report
from parity_tests.registry import CASES, FIRST_CASES, LANGUAGE_MODELS, LAYERS, TIME


@functools.lru_cache(maxsize=1)
def checked(name: str) -> CheckedLayer:
    return CheckedLayer(CASES[name])


@functools.lru_cache(maxsize=1)
def with_twin(name: str) -> tuple[Problem, TorchReference]:
    """A case's problem, and its twin after the run in float64, which serves all dtypes."""
    problem = CASES[name].problem()
    return problem, TorchReference(problem.twin).run(problem)


def assert_within_bounds(report: Report) -> None:
    assert report.passed, f"\n{report}"


def rows(names, is_quick=lambda name: True):
    """A test parameter for each case. The tests of a case share a process and its programs."""
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=[pytest.mark.xdist_group(name), *slow_unless(is_quick(name))])
            for name in names
        ],
    )


def slow_unless(quick: bool) -> list[pytest.MarkDecorator]:
    return [] if quick else [pytest.mark.slow]


def platform_here(name) -> str:
    """The first platform of the case that this machine has."""
    platforms = CASES[name].platforms
    here = [platform for platform in platforms if platform in available_platforms()]
    return here[0] if here else pytest.skip(f"no {' or '.join(platforms)} on this machine")


QUICK = {name for name in LAYERS if CASES[name].architecture != "silero_vad"}
"""The first case of each architecture that is a layer, not a model. `make test` runs the basic
checks on them."""


@rows(CASES, {*FIRST_CASES.values()}.__contains__)
def test_agrees_with_twin(name):
    """In the case's finest dtype."""
    dtypes, platform = CASES[name].dtypes[:1], platform_here(name)
    assert_within_bounds(measure(*with_twin(name), dtypes, platform))


def rounds_as_first(name: str) -> bool:
    """Whether a case is not the first of its architecture, and does not name a `method`."""
    return name not in FIRST_CASES.values() and "method" not in getattr(
        CASES[name].layer, "keywords", {}
    )


OTHER_DTYPES = {
    name: case.dtypes[1:2] if rounds_as_first(name) else case.dtypes[1:]
    for name, case in CASES.items()
    if len(case.dtypes) > 1 and (case.config is None or name in LANGUAGE_MODELS)
}
"""The dtypes in which a case is compared besides its finest one.

Options change what is computed, which float64 shows, and casts, which float32 shows. How a method
rounds to bfloat16 is shown by its first case. A cast that a language model forgets is an error
under strict promotion, which `test_contract.py` shows for each.
"""


@pytest.mark.slow
@rows(OTHER_DTYPES)
def test_agrees_with_twin_in_the_other_dtypes(name):
    assert_within_bounds(measure(*with_twin(name), OTHER_DTYPES[name], platform_here(name)))


@pytest.mark.optimized
@rows([*LAYERS, *LANGUAGE_MODELS])
def test_agrees_with_twin_in_float32_as_compiled_for_users(name):
    problem = CASES[name].problem()
    assert_within_bounds(measure_twin(problem, ["float32"], platform_here(name)))


@rows((name for name, case in CASES.items() if case.packs), lambda name: "1 layer" in name)
def test_agrees_with_twin_on_rows_of_several_lengths(name):
    lengths = np.array([3, TIME, 1])
    padded = CASES[name].problem(given_state=False, lengths=lengths)
    assert_within_bounds(measure_twin(padded, CASES[name].dtypes[:1], platform_here(name)))


BASIC = (
    "state goes back in",
    "steps equal sequence",
    "future has no influence and far past has",
    "padding has no influence",
    "documents in a row stay apart",
    "weights make the round trip bit for bit",
)
"""The checks that `make test` runs."""


@pytest.mark.parametrize(
    ("name", "check"),
    [
        pytest.param(
            *(name, check),
            marks=[
                pytest.mark.xdist_group(name),
                *slow_unless(name in QUICK and check in BASIC),
            ],
        )
        for name, check in COLLECTED
    ],
)
def test_holds(name, check):
    CHECKS[check](checked(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.config])
def test_the_twin_generates_from_its_state(name):
    """The expected text reads the whole text, or its longest context, again for each token."""
    twin = CASES[name].build_twin().eval()
    prompt = text = torch.tensor(CASES[name].inputs(time=4))
    for _ in range(14):  # longer than every context
        window = text if twin.context_length is None else text[:, -twin.context_length :]
        text = torch.cat([text, twin(window)[0][:, -1:].argmax(-1)], dim=1)
    found = torch_ref.generate(twin, prompt, 14, temperature=0)
    assert torch.equal(found, text[:, 4:])
