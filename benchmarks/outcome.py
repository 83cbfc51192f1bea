"""The results of a family: rows of times, and checks of the targets."""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Literal

from benchmarks.problem import OURS

TIE_TOLERANCE = 0.1
"""Relative differences below this are ties."""
COMPARABLE_ERROR = 1e-3
"""With a larger relative error, a contender computes something different."""


@dataclasses.dataclass(frozen=True)
class Row:
    """The results of a contender on one part of a problem."""

    problem: str
    part: str
    name: str
    framework: str
    ms: float
    """The median time of a call, in milliseconds."""
    limit_ms: float | None = None
    """The least time that the limits of the machine allow."""
    compile_s: float | None = None
    memory: int | None = None
    """The bytes of arguments, results and temporaries."""
    error: float | None = None
    """The relative root-mean-square error of y against float64."""
    gradient_error: float | None = None
    """The largest error of a gradient."""
    calls: int = 1
    """Number of calls that the median is computed over."""
    disturbed: bool = False
    """Whether other processes ran all the time. The time is then that of the quietest bursts."""

    @property
    def ours(self) -> bool:
        """Whether the contender is ours, or a variant of ours."""
        return self.name.split(",")[0] == OURS

    @property
    def comparable(self) -> bool:
        """Whether the contender computes the same as the oracle."""
        return max(self.error or 0.0, self.gradient_error or 0.0) < COMPARABLE_ERROR


@dataclasses.dataclass(frozen=True)
class Check:
    """A measured number and its target."""

    problem: str
    part: str
    what: str
    value: float
    bound: float
    at_least: bool = False
    unit: str = ""
    """The unit, with a space before it. Numbers with a unit are printed without decimals."""

    @property
    def verdict(self) -> Literal["pass", "tie", "MISS"]:
        """Whether the number reaches its target; a miss by less than `TIE_TOLERANCE` is a tie."""
        excess = self.bound / self.value if self.at_least else self.value / self.bound
        return "pass" if excess <= 1 else "tie" if excess <= 1 + TIE_TOLERANCE else "MISS"

    @property
    def measured(self) -> str:
        """The measured number with its unit."""
        return self._text(self.value)

    @property
    def target(self) -> str:
        """The target as text, such as `≤ 0.50`."""
        return f"{'≥' if self.at_least else '≤'} {self._text(self.bound)}"

    def __str__(self) -> str:
        return f"{self.what}: {self.measured} ({self.target})"

    def _text(self, x: float) -> str:
        return f"{x:.0f}{self.unit}" if self.unit else f"{x:.2f}"


@dataclasses.dataclass
class Outcome:
    """The results of a family, or of some of its problems."""

    rows: list[Row] = dataclasses.field(default_factory=list)
    checks: list[Check] = dataclasses.field(default_factory=list)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    """The reason why a contender is missing, by its name."""
    notes: list[str] = dataclasses.field(default_factory=list)

    def __iadd__(self, other: "Outcome") -> "Outcome":
        self.rows += other.rows
        self.checks += other.checks
        self.left_out |= other.left_out
        self.notes += other.notes
        return self

    def row(self, problem: str, part: str, name: str = OURS) -> Row:
        """The row of a contender at one part of a problem."""
        return next(r for r in self.rows if (r.problem, r.part, r.name) == (problem, part, name))


def check_targets(rows: list[Row], targets: Mapping[str, Mapping[str, float]]) -> list[Check]:
    """Compares one part of a problem with the targets of each of our contenders, by its name.

    A target is against a contender of any name, or against the fastest peer of a framework, for the
    contenders that were measured.
    """
    found = []
    for ours in (row for row in rows if row.name in targets):
        check = partial(Check, ours.problem, ours.part)
        for against, bound in targets[ours.name].items():
            if against == "limit":
                if ours.limit_ms is not None:
                    share = ours.limit_ms / ours.ms
                    found.append(
                        check(f"{ours.name}, share of the limit", share, bound, at_least=True)
                    )
                continue
            rivals = [row for row in rows if row.comparable and against in _names(row)]
            if rivals:
                rival = min(rivals, key=lambda row: row.ms)
                found.append(check(f"{ours.name} / {rival.name}", ours.ms / rival.ms, bound))
    return [check for check in found if math.isfinite(check.value)]


def _names(row: Row) -> tuple[str, ...]:
    """The name of a contender, and that of the peers of its framework."""
    if row.ours:
        return (row.name,)
    return row.name, {"torch": "torch", "jax": "JAX peer"}[row.framework]
