"""Formats the report as an HTML page, which needs no network."""

import io
from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from parity_tests.report.record import Measurement, Record
from parity_tests.report.terminal import print_record

WIDTH = 200


def page(record: Record) -> str:
    """A page with the terminal's report, every tensor, and where each failing pair departs."""
    console = Console(record=True, file=io.StringIO(), width=WIDTH, highlight=False)
    console.rule(_verdict(record))
    print_record(record, console)
    if record.tensors:
        console.print(_tensor_table(record.tensors))
    for case, text in record.locations.items():
        console.print(escape(f"\n{case}\n{text}"))
    console.print(", ".join(f"{name} {version}" for name, version in record.versions.items()))
    return console.export_html()


def _verdict(record: Record) -> str:
    failing = len(record.failing)
    agreeing = len(record.cases) - failing
    agree = "pair agrees" if agreeing == 1 else "pairs agree"
    return f"{agreeing} {agree}; {failing} {'fails' if failing == 1 else 'fail'}"


def _tensor_table(measurements: Iterable[Measurement]) -> Table:
    """A table with a row for each tensor, the largest errors relative to their bounds first."""
    table = Table(title="errors of every tensor", title_justify="left")
    for column in ("case", "on", "dtype", "group", "torch", "JAX", "bound", "verdict", "tensor"):
        table.add_column(column, overflow="fold")
    for m in sorted(measurements, key=lambda m: m.error.share, reverse=True):
        errors = (f"{error:.1e}" for error in (m.error.torch, m.error.jax, m.error.bound))
        color = "green" if m.error.passed else "red"
        verdict = f"[{color}]{m.error.verdict}"
        names = (escape(m.case), m.platform, m.dtype, m.group)
        table.add_row(*names, *errors, verdict, escape(m.error.tensor))
    return table
