"""Draws a family."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from benchmarks.outcome import Row
from benchmarks.report.table import milliseconds

matplotlib.use("Agg")

LONGEST = 4
"""The longest bar, as a multiple of our time. Longer bars are cut off."""
OPACITIES = (1.0, 0.5)
"""The opacities of the allocators, in their order."""

RowsByAllocator = dict[str, list[Row]]


def bars(found: RowsByAllocator, title: str) -> Figure:
    """Draws a panel for each part of each problem: a bar for each contender, and the limit."""
    rows = [row for rows in found.values() for row in rows]
    panels = list(dict.fromkeys((row.problem, row.part) for row in rows))
    problems = list(dict.fromkeys(problem for problem, _ in panels))
    parts = {name: [part for problem, part in panels if problem == name] for name in problems}
    columns = max(map(len, parts.values()))
    names = max(len({row.name for row in rows if row.problem == p}) for p in problems)
    height = 0.7 + (0.12 + 0.16 * len(found)) * names
    figure = Figure(figsize=(5.5 * columns, height * len(problems)), layout="constrained")
    axes = figure.subplots(len(problems), columns, squeeze=False)
    for panel in axes.flat:
        panel.set_axis_off()
    for problem, part in panels:
        panel = axes[problems.index(problem)][parts[problem].index(part)]
        here = {
            allocator: [row for row in rows if (row.problem, row.part) == (problem, part)]
            for allocator, rows in found.items()
        }
        _bars(panel, here)
        panel.set_axis_on()
        panel.set_title(f"{problem}, {part}", fontsize=9)
    figure.suptitle(f"{title}\nallocator, from above: {', '.join(found)}")
    return figure


def _bars(panel, found: RowsByAllocator) -> None:
    everything = sorted((row for rows in found.values() for row in rows), key=lambda row: row.ms)
    names = list(dict.fromkeys(row.name for row in everything))
    longest = LONGEST * max((row.ms for row in everything if row.ours), default=np.inf)
    thickness = 0.8 / len(found)
    for turn, (rows, opacity) in enumerate(zip(found.values(), OPACITIES, strict=False)):
        offset = (turn - (len(found) - 1) / 2) * thickness
        colors = ["C3" if row.ours else "C1" if row.framework == "torch" else "C0" for row in rows]
        drawn = panel.barh(
            [names.index(row.name) + offset for row in rows],
            [min(row.ms, longest) for row in rows],
            height=thickness,
            color=colors,
            alpha=opacity,
        )
        panel.bar_label(drawn, [f" {milliseconds(row.ms)}" for row in rows], fontsize=6)
    panel.set_yticks(range(len(names)), names)
    if everything[0].limit_ms:
        panel.axvline(everything[0].limit_ms, color="black", linewidth=0.8, linestyle="--")
    panel.invert_yaxis()
    panel.margins(x=0.2)
    panel.set_xlabel("ms", fontsize=8)
    panel.tick_params(labelsize=8)


def ratios(
    found: RowsByAllocator, title: str, lines: Mapping[tuple[str, str], str], against: str
) -> Figure:
    """Draws our times over those of another contender, with a panel for each part.

    `lines` maps the names of each problem and contender of ours to the line of their ratio.
    """
    labels = list(dict.fromkeys(lines.values()))
    parts = list(dict.fromkeys(row.part for rows in found.values() for row in rows))
    figure = Figure(figsize=(10, 4), layout="constrained")
    for panel, part in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        for rows in found.values():
            times = {(row.problem, row.name): row.ms for row in rows if row.part == part}
            measured = [
                (problem, name)
                for problem, name in times
                if (problem, name) in lines and (problem, against) in times
            ]
            panel.plot(
                [times[key] / times[key[0], against] for key in measured],
                [labels.index(lines[key]) for key in measured],
                "o",
                alpha=0.5,
            )
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.axvline(1, color="black", linewidth=0.8, linestyle="--")
        panel.set_yticks(range(len(labels)), labels)
        panel.invert_yaxis()
        panel.set_xlabel(f"{part}: time / that of {against}")
    figure.suptitle(title)
    return figure


def draw(figure: Figure, path: Path) -> None:
    """Writes a figure to a file."""
    figure.savefig(path, dpi=110)
