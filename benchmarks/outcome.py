"""What comes of a family: rows of times, and checks of what was promised."""

import dataclasses
import math
from typing import Literal

from benchmarks.problem import OURS

TIE = 0.1
"""Differences below this part are ties."""
SAME = 1e-3
"""A larger error, and a contender computes something else."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A contender at one part of a problem."""

    problem: str
    part: str
    name: str
    framework: str
    ms: float
    """Median."""
    limit_ms: float | None = None
    """What the machine's limits allow."""
    compile_s: float | None = None
    memory: int | None = None
    """Bytes of arguments, results and temporaries."""
    error: float | None = None
    """Of y against float64, root mean square, relative."""
    gradient_error: float | None = None
    """The largest of the gradients'."""
    calls: int = 1
    """That were timed while the machine was quiet."""
    disturbed: bool = False
    """The machine never was: the time is that of the quietest."""

    @property
    def ours(self) -> bool:
        """Whether it is ours, or a variant."""
        return self.name.split(",")[0] == OURS

    @property
    def comparable(self) -> bool:
        """Whether it computes the same."""
        return max(self.error or 0.0, self.gradient_error or 0.0) < SAME


@dataclasses.dataclass(frozen=True)
class Check:
    """A number, and the bound that it should keep."""

    problem: str
    part: str
    what: str
    value: float
    bound: float
    at_least: bool = False
    unit: str = ""
    """With the space before it. Where there is one, numbers are whole."""

    @property
    def verdict(self) -> Literal["pass", "tie", "MISS"]:
        """Whether it does; a tie is a miss by less than `TIE`."""
        excess = self.bound / self.value if self.at_least else self.value / self.bound
        return "pass" if excess <= 1 else "tie" if excess <= 1 + TIE else "MISS"

    @property
    def measured(self) -> str:
        """The number, in its unit."""
        return self._text(self.value)

    @property
    def target(self) -> str:
        """What it should be."""
        return f"{'≥' if self.at_least else '≤'} {self._text(self.bound)}"

    def __str__(self) -> str:
        return f"{self.what}: {self.measured} ({self.target})"

    def _text(self, x: float) -> str:
        return f"{x:.0f}{self.unit}" if self.unit else f"{x:.2f}"


@dataclasses.dataclass
class Outcome:
    """Of a family, or of some of its problems."""

    rows: list[Row] = dataclasses.field(default_factory=list)
    checks: list[Check] = dataclasses.field(default_factory=list)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    """Why a contender is missing, by name."""
    notes: list[str] = dataclasses.field(default_factory=list)

    def __iadd__(self, other: "Outcome") -> "Outcome":
        self.rows += other.rows
        self.checks += other.checks
        self.left_out |= other.left_out
        self.notes += other.notes
        return self

    def row(self, problem: str, part: str, name: str = OURS) -> Row:
        """The one of this name."""
        return next(r for r in self.rows if (r.problem, r.part, r.name) == (problem, part, name))


def check_targets(rows: list[Row], targets) -> list[Check]:
    """What one part of a problem promises, as far as the peers are there."""
    ours = next((row for row in rows if row.name == OURS), None)
    if ours is None:
        return []
    peers = [row for row in rows if not row.ours and row.comparable]
    found = []
    for against, bound in targets.items():
        where = {"problem": ours.problem, "part": ours.part, "bound": bound}
        if against == "limit":
            if ours.limit_ms is not None:
                share = ours.limit_ms / ours.ms
                found.append(Check(what="share of the limit", value=share, at_least=True, **where))
            continue
        frameworks = {"torch": "torch", "JAX peer": "jax"}
        rivals = [p for p in peers if against in (p.name, *_aliases(p, frameworks))]
        if rivals:
            rival = min(rivals, key=lambda row: row.ms)
            what = f"{OURS} / {rival.name}"
            found.append(Check(what=what, value=ours.ms / rival.ms, **where))
    return [check for check in found if math.isfinite(check.value)]


def _aliases(row: Row, frameworks: dict[str, str]) -> list[str]:
    return [alias for alias, framework in frameworks.items() if row.framework == framework]
