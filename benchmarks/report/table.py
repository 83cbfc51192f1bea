"""Prints tables in the terminal."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.outcome import Check, Outcome, Row
from benchmarks.problem import OURS

STYLES = {"pass": "green", "tie": "yellow", "MISS": "bold red"}


def show(console: Console, outcome: Outcome) -> None:
    """Prints a table for each problem, then the checks, the notes and the missing contenders."""
    for problem in dict.fromkeys(row.problem for row in outcome.rows):
        console.print(table(problem, [row for row in outcome.rows if row.problem == problem]))
    for check in outcome.checks:
        console.print(check_line(check))
    for note in outcome.notes:
        console.print(note)
    for name, reason in outcome.left_out.items():
        console.print(f"{name}: left out, {reason}", style="dim")
    console.print()


def check_line(check: Check) -> Text:
    """A check, and its verdict in color."""
    text = Text(f"  {check.problem}, {check.part}, {check} ")
    return text.append(check.verdict, STYLES[check.verdict])


def table(problem: str, rows: list[Row]) -> Table:
    """A table with a row for each contender. `ratio` is our time divided by the contender's."""
    parts = list(dict.fromkeys(row.part for row in rows))
    result = Table(title=problem, title_justify="left")
    result.add_column()
    for part in parts:
        for column in (part, "ratio", "of limit", "compile"):
            result.add_column(column, justify="right")
    for column in ("memory", "error", "gradients"):
        result.add_column(column, justify="right")
    for name in dict.fromkeys(row.name for row in rows):
        mine = {row.part: row for row in rows if row.name == name}
        cells = []
        for part in parts:
            row = mine.get(part)
            cells += [*time_cells(row, rows), compile_cell(row)]
        result.add_row(name, *cells, *other_cells(mine[list(mine)[-1]]))
    return result


def time_cells(row: Row | None, rows: list[Row]) -> list[str]:
    """The cells for the time, the ratio and the share of the limit."""
    if row is None:
        return ["–"] * 3
    key = (row.problem, row.part, OURS)
    ours = [other for other in rows if (other.problem, other.part, other.name) == key]
    return [
        milliseconds(row.ms) + (" ?" if row.disturbed else ""),
        f"{ours[0].ms / row.ms:.2f}" if ours else "–",
        f"{row.limit_ms / row.ms:.0%}" if row.limit_ms else "–",
    ]


def compile_cell(row: Row | None) -> str:
    """The cell for the seconds to compile."""
    return "–" if row is None or row.compile_s is None else f"{row.compile_s:.1f} s"


def other_cells(row: Row) -> list[str]:
    """The cells for the memory and both errors."""
    return [
        f"{row.memory / 2**20:,.0f} MiB" if row.memory else "–",
        error_cell(row.error, row.comparable),
        error_cell(row.gradient_error, row.comparable),
    ]


def milliseconds(ms: float) -> str:
    """A time with three digits and a unit."""
    value, unit = (1e3 * ms, "µs") if ms < 1 else (ms, "ms") if ms < 10_000 else (ms / 1e3, "s")
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def error_cell(value: float | None, comparable: bool) -> str:
    """A relative error, with a mark if the contender computed something different."""
    return "–" if value is None else f"{value:.0e}" + ("" if comparable else " differs")
