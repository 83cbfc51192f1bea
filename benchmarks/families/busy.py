"""The compiled kernels beside busy processes.

One, two or three processes compete for the cores with our kernels, and with XLA, which computes the
same without them. A kernel that waited for a thread without a core would be much slower.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from benchmarks.families import attention, gated, plain
from benchmarks.families.gated.ours_and_torch import by_method as gated_by_method
from benchmarks.families.plain.pairs import Run, run_selective_scan, run_state_space
from benchmarks.problem import OURS, Contenders, Function, Problem, operator, require_kernels
from benchmarks.report.plot import RowsByAllocator, ratios

XLA = "XLA"
MAX_RATIO = 1.1
"""The largest allowed ratio of the kernels' time to XLA's."""
MIN_STEPS = 33
"""The number of steps from which `method="auto"` uses all kernels."""


class Kind(NamedTuple):
    """Problems with kernels."""

    problems: Callable[[bool], list[Any]]
    by_method: Callable[[Any, str], Function]
    xla: str
    """The form that XLA computes."""


def scan(name: str, run: Run) -> Kind:
    """A scan of the family `plain`, in some of its sizes, and in chunks where XLA computes it."""

    def problems(quick: bool) -> list[plain.Operator]:
        found = [each for each in plain.problems(quick=False) if each.operator == name]
        long = [each for each in found if each.sizes[1] >= MIN_STEPS]
        return long[:1] if quick else long[::4]

    def by_method(problem: Problem, method: str) -> Function:
        return operator(problem, partial(run, method))

    return Kind(problems, by_method, "chunked")


KINDS = {
    "gated": Kind(gated.problems, gated_by_method, "xla"),
    "attention": Kind(attention.problems, attention.by_method, "small_tiles"),
    "state space": scan("state space", run_state_space),
    "selective scan": scan("selective_scan", run_selective_scan),
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

    def targets(self, part, platform):
        """The kernels are not slower than XLA."""
        return {XLA: MAX_RATIO}


def problems(quick: bool) -> list[Busy]:
    """All problems that have kernels."""
    return [
        Busy(name, problem, num_busy)
        for name, kind in KINDS.items()
        for problem in kind.problems(quick)
        for num_busy in ((2,) if quick else (1, 2, 3))
    ]


contenders = Contenders()


@contenders.jax(OURS)
def ours(problem: Busy) -> Function:
    """The kernels of twinscan-native."""
    require_kernels()
    return KINDS[problem.kind].by_method(problem.problem, "native")


@contenders.jax(XLA)
def xla(problem: Busy) -> Function:
    """The form that "auto" would choose without the kernels."""
    kind = KINDS[problem.kind]
    return kind.by_method(problem.problem, kind.xla)


def plot(found: RowsByAllocator, title: str) -> Figure:
    """Draws the ratios of all sizes, with a line for each kind and number of busy processes."""
    lines = {each.name: f"{each.kind}, {each.num_busy} busy" for each in problems(quick=False)}
    return ratios(found, title, lines, XLA)
