"""The compiled kernels beside busy processes.

One, two or three processes compete for the cores with our kernels, and with XLA, which computes the
same without them. A kernel that waited for a thread without a core would be much slower.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from benchmarks.families import attention, gated
from benchmarks.families.gated.ours_and_torch import by_method
from benchmarks.families.plain import Operator
from benchmarks.families.plain.pairs import run_selective_scan, run_state_space
from benchmarks.problem import NATIVE, OURS, Contenders, Function, Problem, operator
from benchmarks.report.plot import RowsByAllocator, ratios

MAX_RATIO = 1.1
"""The largest allowed ratio of the kernels' time to XLA's."""


class Kind(NamedTuple):
    """Problems with kernels, and what computes them by a method."""

    problems: tuple[Any, ...]
    by_method: Callable[[Any, str], Function]


def scan(run: Callable, operator_name: str, *sizes: tuple[int, ...]) -> Kind:
    """A scan of the family `plain`."""
    return Kind(
        tuple(Operator(operator_name, each) for each in sizes),
        lambda problem, method: operator(problem, partial(run, method)),
    )


KINDS = {
    "gated": Kind(tuple(gated.problems(quick=False)), by_method),
    "attention": Kind(tuple(attention.problems(quick=False)), attention.by_method),
    "state space": scan(
        run_state_space,
        "state space",
        (1, 300, 2, 4, 64, 64),
        (1, 1024, 1, 24, 64, 128),
        (2, 500, 1, 32, 64, 128),
        (8, 128, 1, 8, 64, 256),
    ),
    "selective scan": scan(
        run_selective_scan,
        "selective_scan",
        (1, 300, 128, 16),
        (1, 1024, 1536, 16),
        (4, 512, 192, 16),
        (8, 128, 256, 16),
    ),
}


@dataclasses.dataclass(frozen=True)
class Busy(Problem):
    """A problem of another family, beside busy processes."""

    kind: str
    problem: Any
    num_busy: int
    rounds = 3

    @property
    def name(self) -> str:
        """The problem and the number of busy processes."""
        return f"{self.problem.name}, {self.num_busy} busy"

    def cotangent(self):
        """The gradient of the other family."""
        return self.problem.cotangent()

    def targets_with_kernels(self, part, platform):
        """The kernels are not slower than XLA."""
        return {OURS: MAX_RATIO}


def problems(quick: bool) -> list[Busy]:
    """The problems of each kind, beside each number of processes."""
    return [
        Busy(name, problem, num_busy)
        for name, kind in KINDS.items()
        for problem in (kind.problems[:1] if quick else kind.problems)
        for num_busy in ((2,) if quick else (1, 2, 3))
    ]


contenders = Contenders()


@contenders.jax(OURS)
def ours(problem: Busy) -> Function:
    """The form that "auto" chooses without the kernels, which XLA compiles."""
    return KINDS[problem.kind].by_method(problem.problem, "auto")


@contenders.jax(NATIVE, kernels=True)
def ours_native(problem: Busy) -> Function:
    """The kernels of twinscan-native."""
    return KINDS[problem.kind].by_method(problem.problem, "native")


def plot(found: RowsByAllocator, title: str) -> Figure:
    """Draws the ratios of all sizes, with a line for each kind and number of busy processes."""
    lines = {
        (each.name, NATIVE): f"{each.kind}, {each.num_busy} busy" for each in problems(quick=False)
    }
    return ratios(found, title, lines, OURS)
