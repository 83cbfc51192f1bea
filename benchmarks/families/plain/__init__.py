"""Each operator against a plain JAX version: the scan or the expression that you write first."""

import dataclasses

import jax
import numpy as np
from matplotlib.figure import Figure

from benchmarks.families.plain.pairs import PAIRS, Pair
from benchmarks.oracle import in_float64
from benchmarks.problem import OURS, Contenders, Problem, operator
from benchmarks.report.plot import RowsByAllocator

PLAIN = "plain"


@dataclasses.dataclass(frozen=True)
class Operator(Problem):
    """A pair of versions of an operator, at some sizes."""

    operator: str
    sizes: tuple[int, ...]
    rounds = 3

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

    def oracle(self):
        """Computes the plain version in float64."""
        return in_float64(self.pair.plain, self.arrays(), self.cotangent())

    def targets(self, part, platform):
        """No operator takes longer than its plain version."""
        return {PLAIN: 1.0}


def problems(quick: bool) -> list[Operator]:
    """Small, large, odd and even sizes, with one row or many."""
    return [
        Operator(name, sizes)
        for name, pair in PAIRS.items()
        for sizes in (pair.sizes[:1] if quick else pair.sizes)
    ]


contenders = Contenders()


@contenders.jax(OURS)
def ours(problem: Operator):
    """Our operator, with `method="auto"`."""
    return operator(problem, problem.pair.ours)


@contenders.jax(PLAIN)
def plain(problem: Operator):
    """The plain version."""
    return operator(problem, problem.pair.plain)


def plot(found: RowsByAllocator, title: str) -> Figure:
    """Draws the ratios of all sizes, with a panel for each part and a line for each operator."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    parts = list(dict.fromkeys(row.part for rows in found.values() for row in rows))
    operators = list(PAIRS)
    lines = {each.name: operators.index(each.operator) for each in problems(quick=False)}
    for panel, part in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        for rows in found.values():
            times = {(row.problem, row.name): row.ms for row in rows if row.part == part}
            measured = [
                problem
                for problem, name in times
                if name == OURS and (problem, PLAIN) in times and problem in lines
            ]
            panel.plot(
                [times[problem, OURS] / times[problem, PLAIN] for problem in measured],
                [lines[problem] for problem in measured],
                "o",
                alpha=0.5,
            )
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.axvline(1, color="black", linewidth=0.8, linestyle="--")
        panel.set_yticks(range(len(operators)), operators)
        panel.invert_yaxis()
        panel.set_xlabel(f"{part}: our time / the plain version's")
    figure.suptitle(title)
    return figure
