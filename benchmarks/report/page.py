"""`results/README.md`: all families that have been measured."""

from pathlib import Path

from benchmarks.outcome import Row
from benchmarks.problem import OURS
from benchmarks.report.store import Record, path, read_all
from benchmarks.report.table import error, part_cells

INTRODUCTION = """\
# Results

`make bench` wrote this page; `python -m benchmarks --only gated` measures one family again. Times
are medians over calls in bursts that alternate between the contenders, float32, without those
during which other processes ran ("?": there were none). *Ratio* is our time over theirs: below 1,
ours is faster, and differences under 10 % are ties. *Of limit*: the least time that the operations
and bytes would take at the limits measured in the same run. *Error* and *gradients* are against
float64, root mean square, relative; the gradients' is the largest of all inputs' and weights'.
"""


def write_page(folder: Path, order: list[str]) -> None:
    """From the records that are there."""
    records = [record for record in read_all(folder) if record.family in order]
    records.sort(key=lambda record: (record.platform, order.index(record.family)))
    sections = [INTRODUCTION, *(section(folder, record) for record in records)]
    (folder / "README.md").write_text("\n".join(sections))


def section(folder: Path, record: Record) -> str:
    """A family."""
    lines = [f"## {record.title} ({record.platform})\n", _measured_with(record), ""]
    plot = path(folder, record, "png")
    if plot.exists():
        lines += [f"![{record.title}]({plot.name})\n"]
    if record.outcome.checks:
        lines += ["| | | | measured | target | |", "|---|---|---|--:|--:|---|"]
        for check in record.outcome.checks:
            where = f"{check.problem} | {check.part} | {check.what}"
            numbers = f"{check.measured} | {check.target}"
            lines.append(f"| {where} | {numbers} | {check.verdict} |")
        lines.append("")
    for note in record.outcome.notes:
        lines += [note, ""]
    lines += _rows(record.outcome.rows)
    lines += [f"Left out: {name}: {why}." for name, why in record.outcome.left_out.items()]
    return "\n".join(lines) + "\n"


def _measured_with(record: Record) -> str:
    words = [f"{name} {value}" for name, value in record.measured_with.items()]
    if record.limits:
        limits = record.limits
        words.append(
            f"limits {limits.gflops:.0f} GFLOP/s, {limits.gbytes:.0f} GB/s, "
            f"{limits.dispatch_us:.0f} µs a call"
        )
    return ("A quick run. " if record.quick else "") + ", ".join(words) + "."


def _rows(rows: list[Row]) -> list[str]:
    columns = ("time", "ratio", "of limit", "compile", "memory", "error", "gradients")
    lines = [f"| | | | {' | '.join(columns)} |", "|---|---|---" + len(columns) * "|--:" + "|"]
    for row in rows:
        cells = (
            row.problem,
            row.part,
            f"**{row.name}**" if row.name == OURS else row.name,
            *part_cells(row, [r for r in rows if r.problem == row.problem]),
            f"{row.memory / 2**20:,.0f} MiB" if row.memory else "–",
            error(row.error, row.comparable),
            error(row.gradient_error, row.comparable),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]
