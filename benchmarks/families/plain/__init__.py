"""Each operator against a plain JAX version: the scan or the expression that you write first."""

import dataclasses
import itertools
from collections import defaultdict

import jax
import numpy as np
from matplotlib.figure import Figure

from benchmarks.compare import Session, compare
from benchmarks.families.plain.pairs import PAIRS, Pair
from benchmarks.outcome import Check, Outcome
from benchmarks.problem import NATIVE, OURS, Contenders, Problem, operator
from benchmarks.report.plot import RowsByAllocator, ratios

PLAIN = "plain"
MAX_COMPILE_RATIO = 2.0
"""The largest allowed ratio of two times to compile: an operator's over its plain version's."""


@dataclasses.dataclass(frozen=True)
class Operator(Problem):
    """A pair of versions of an operator, at some sizes."""

    operator: str
    sizes: tuple[int, ...]
    solved_by: tuple[str, ...] | None = None
    rounds = 2

    @property
    def name(self) -> str:
        """The operator and the sizes."""
        return f"{self.operator} {' × '.join(map(str, self.sizes))}"

    @property
    def pair(self) -> Pair:
        """The operator and its plain version."""
        return PAIRS[self.operator]

    def arrays(self):
        """Random arrays, the same for each call."""
        return self.pair.draw(np.random.default_rng(0), *self.sizes)

    def cotangent(self):
        """A random gradient of y."""
        y = jax.eval_shape(lambda arrays: self.pair.plain(**arrays), self.arrays())
        return np.random.default_rng(1).standard_normal(y.shape, np.float32)

    def targets(self, part, platform):
        """No operator takes longer than its plain version."""
        return {PLAIN: 1.0}


def problems(quick: bool) -> list[Operator]:
    """Small, large, odd and even sizes, with one row or many."""
    return [
        Operator(name, sizes, None if pair.has_kernels else (OURS, PLAIN))
        for name, pair in PAIRS.items()
        for sizes in (pair.sizes[:1] if quick else pair.sizes)
    ]


contenders = Contenders()


@contenders.jax(OURS)
def ours(problem: Operator):
    """Our operator, with `method="auto"`, which chooses among the forms without kernels."""
    return operator(problem, problem.pair.ours)


@contenders.jax(NATIVE, kernels=True)
def ours_native(problem: Operator):
    """Our operator, which may also choose the kernels of twinscan-native."""
    return operator(problem, problem.pair.ours)


@contenders.jax(PLAIN)
def plain(problem: Operator):
    """The plain version."""
    return operator(problem, problem.pair.plain)


def measure(session: Session) -> Outcome:
    """Measures all operators, and checks the times to compile, over all sizes."""
    measured = problems(session.quick)
    outcome = compare(session, __name__, contenders, measured)
    for name, part in itertools.product(PAIRS, Operator.parts):
        problem_names = {each.name for each in measured if each.operator == name}
        rows = [r for r in outcome.rows if r.problem in problem_names and r.part == part]
        seconds: defaultdict[str, float] = defaultdict(float)
        for row in rows:
            seconds[row.name] += row.compile_s or 0.0
        for contender in (each for each in (OURS, NATIVE) if each in seconds):
            what = f"{contender} / {PLAIN}, seconds to compile"
            ratio = seconds[contender] / seconds[PLAIN]
            outcome.checks.append(Check(name, part, what, ratio, MAX_COMPILE_RATIO))
    return outcome


def plot(found: RowsByAllocator, title: str) -> Figure:
    """Draws the ratios of all sizes, with a line for each operator, and one for its kernels."""
    lines = {(each.name, OURS): each.operator for each in problems(quick=False)}
    with_kernels = [each for each in problems(quick=False) if each.pair.has_kernels]
    lines |= {(each.name, NATIVE): f"{each.operator}, native" for each in with_kernels}
    return ratios(found, title, lines, PLAIN)
