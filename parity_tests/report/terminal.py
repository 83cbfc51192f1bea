"""Prints the report on a terminal."""

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from parity_tests.engine.bounds.tolerance import FLOAT64, FLOOR_ULPS, Error, K
from parity_tests.engine.logits import LogitsError, logits_lines
from parity_tests.engine.results import GROUPS
from parity_tests.report.record import PrecisionError, Record


def print_record(record: Record, console: Console) -> None:
    """Prints the tables, the failures, the notes, and the platforms that ran."""
    console.print(error_table(record, console.width))
    if record.precision:
        console.print(precision_table(record.precision))
    logits: dict[str, dict[str, dict[str, LogitsError]]] = {}
    for m in record.logits:
        case_errors = logits.setdefault(f"{m.case}, {m.platform}", {})
        case_errors.setdefault(m.dtype, {})[m.side] = m.error
    for case, errors in logits.items():
        console.print(escape("\n".join([case, *logits_lines(errors)])))
    for m in record.measurements:
        if not m.error.passed:
            console.print(
                f"[red]{m.error.verdict}[/] {escape(f'{m.key}: worst in {m.error.tensor}')}"
            )
    for fault in record.faults:
        console.print(f"[red]FAIL[/] {escape(fault)}")
    for m in record.missed:
        console.print(f"[red]MISSED[/] {m.case}: {m.name}: not caught by {m.check or 'the twin'}")
    if total := len(record.mutations):
        console.print(f"planted faults: {total - len(record.missed)} of {total} caught")
    for case, text in record.locations.items():
        console.print(escape(f"{case}: {text.splitlines()[-1]}"))
    for note in record.notes:
        console.print(escape(f"note: {note}"))
    for platform, state in record.platforms.items():
        console.print(f"{platform}: {state}")
    for case, platforms in record.not_run.items():
        console.print(f"not run: {case}, which runs on {' and '.join(platforms)} only")


def error_table(record: Record, width: int) -> Table:
    """A table with a row for each case, platform and dtype.

    A fault fails all rows of its case and platform, whatever their numbers. A row has two lines if
    the width is below 150 columns.
    """
    rows: dict[tuple[str, str, str], dict[str, Error]] = {}
    for m in record.measurements:
        rows.setdefault((m.case, m.platform, m.dtype), {})[m.group] = m.error
    faulty, measured = record.faulty_places, {row[:2] for row in rows}
    rows |= {(*place, ""): {} for place in sorted(faulty - measured)}
    # Integers have no errors, so a case whose results are all integers has no measurement.
    shown = {case for case, *_ in rows}
    rows |= {(case, "–", ""): {} for case in record.cases if case not in shown}
    result = Table(
        title="errors against the float64 torch twin: torch, JAX, ratio",
        caption=f"float64: JAX ≤ {FLOAT64:.0e}; else JAX ≤ {K:.0f} × torch or "
        f"{K * FLOOR_ULPS:.0f} ulp; or what conditioning explains, if that is more",
    )
    result.add_column("case", overflow="fold")
    for column in ("on", "dtype", *GROUPS, "verdict"):
        result.add_column(column, no_wrap=True)
    separator = " " if width >= 150 else "\n           "
    for (case, platform, dtype), groups in rows.items():
        cells = [error_cell(groups.get(group), separator) for group in GROUPS]
        verdict = "FAIL" if (case, platform) in faulty else row_verdict(groups.values())
        color = "green" if verdict == "pass" else "red"
        result.add_row(escape(case), platform, dtype, *cells, f"[{color}]{verdict}")
    return result


def error_cell(error: Error | None, separator: str) -> str:
    """The text of a cell: torch's error, JAX's error and their ratio; a dash if there is none."""
    if error is None:
        return "–"
    ratio = "    –" if error.ratio is None else f"{error.ratio:5.2f}"
    color = "" if error.passed else "[red]"
    return f"{color}{error.torch:.1e} {error.jax:.1e}{separator}{ratio}"


def row_verdict(errors: Iterable[Error]) -> str:
    """The worst verdict of a row's numbers, which pass if there are none."""
    verdicts = {e.verdict for e in errors}
    return next((v for v in ("FAIL", "undetermined") if v in verdicts), "pass")


def precision_table(errors: Iterable[PrecisionError]) -> Table:
    """A table with a row for each case, platform and format: errors without and with rounding."""
    rows: dict[tuple[str, str, str, bool], dict[str, PrecisionError]] = {}
    for e in errors:
        rows.setdefault((e.case, e.platform, e.precision, e.emulated), {})[e.group] = e
    result = Table(
        title="float32 errors with matrix products in full float32, and with rounded operands",
        caption="bfloat16: a TPU's default; tensorfloat32: a GPU's",
    )
    result.add_column("case", overflow="fold")
    for column in ("on", "operands", *GROUPS):
        result.add_column(column, no_wrap=True)
    for (case, platform, precision, emulated), groups in rows.items():
        cells = (
            f"{groups[group].highest:.1e} {groups[group].error:.1e}" if group in groups else "–"
            for group in GROUPS
        )
        operands = f"{precision}, emulated" if emulated else precision
        result.add_row(escape(case), platform, operands, *cells)
    return result
