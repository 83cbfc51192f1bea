"""A family as a picture."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from benchmarks.outcome import Row
from benchmarks.report.store import Record
from benchmarks.report.table import milliseconds

matplotlib.use("Agg")

LONGEST = 4
"""Times our time: longer bars end there."""


def bars(rows: list[Row], title: str) -> Figure:
    """A panel for each part of each problem: a bar a contender, and a line where the limit is."""
    panels = list(dict.fromkeys((row.problem, row.part) for row in rows))
    parts = list(dict.fromkeys(part for _, part in panels))
    problems = list(dict.fromkeys(problem for problem, _ in panels))
    names = max(len({row.name for row in rows if row.problem == p}) for p in problems)
    figure = Figure(
        figsize=(5.5 * len(parts), (0.7 + 0.28 * names) * len(problems)), layout="constrained"
    )
    axes = figure.subplots(len(problems), len(parts), squeeze=False)
    for (problem, part), panel in (
        ((problem, part), axes[i][j])
        for i, problem in enumerate(problems)
        for j, part in enumerate(parts)
    ):
        _bars(panel, [row for row in rows if (row.problem, row.part) == (problem, part)])
        panel.set_title(f"{problem}, {part}", fontsize=9)
    figure.suptitle(title)
    return figure


def _bars(panel, rows: list[Row]) -> None:
    rows = sorted(rows, key=lambda row: row.ms)
    longest = LONGEST * min((row.ms for row in rows if row.ours), default=rows[-1].ms)
    colors = ["C3" if row.ours else "C1" if row.framework == "torch" else "C0" for row in rows]
    widths = [min(row.ms, longest) for row in rows]
    found = panel.barh([row.name for row in rows], widths, color=colors)
    panel.bar_label(found, [f" {milliseconds(row.ms)}" for row in rows], fontsize=7)
    if rows[0].limit_ms:
        panel.axvline(rows[0].limit_ms, color="black", linewidth=0.8, linestyle="--")
    panel.invert_yaxis()
    panel.margins(x=0.2)
    panel.set_xlabel("ms", fontsize=8)
    panel.tick_params(labelsize=8)


def draw(record: Record, figure: Figure, path: Path) -> None:
    """Into a file."""
    figure.savefig(path, dpi=110)
