"""The page of the results, with all families that have been measured."""

from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import get_args

from benchmarks.problem import OURS, Framework
from benchmarks.report.devices import devices
from benchmarks.report.store import Record, plot_path, read_all
from benchmarks.report.table import compile_cell, other_cells, time_cells

INTRODUCTION = """\
# Results

This page shows the records that `make bench` writes. [Benchmarks](../../docs/benchmarks.md) says
how the times are measured. They are medians in float32; a `?` marks a time that other processes
disturbed. With the *default* allocator, malloc is as users have it, and the *tuned* one keeps the
memory that is freed (`jax_models.tune_allocator`). *Ratio* is our time divided by theirs: below 1,
ours is faster, and differences under 10 % are ties. *Of limit* is the least time that the
operations and bytes would take at the limits measured in the same run, divided by the time.
*Error* and *gradients* are relative root-mean-square errors against float64; that of the gradients
is the largest of all inputs and weights.
"""


def page(folder: Path, order: list[str]) -> str:
    """The Markdown of the page, from all records in the folder, to which its links are relative."""
    records = [record for record in read_all(folder) if record.family in order]
    records.sort(key=lambda record: (record.platform, order.index(record.family)))
    groups = groupby(records, key=lambda record: (record.platform, record.family))
    sections = [section(folder, list(group)) for _, group in groups]
    return "\n".join([INTRODUCTION, devices(folder, records), verdicts(records), *sections])


def verdicts(records: list[Record]) -> str:
    """A table of the numbers of targets that each family reaches and misses."""
    lines = ["## Targets\n", "| | allocator | pass | tie | MISS |", "|---|---|--:|--:|--:|"]
    for record in records:
        count = Counter(check.verdict for check in record.outcome.checks)
        if count:
            numbers = " | ".join(str(count[verdict]) for verdict in ("pass", "tie", "MISS"))
            name = f"{record.title} ({record.platform})"
            lines.append(f"| {name} | {record.allocator} | {numbers} |")
    return "\n".join(lines) + "\n"


def section(folder: Path, records: list[Record]) -> str:
    """The section of a family on a platform, with its allocators side by side."""
    first = records[0]
    lines = [f"## {first.title} ({first.platform})\n", *_measured_with(records)]
    if plot_path(folder, first).exists():
        lines += [f"![{first.title}]({plot_path(folder, first).name})\n"]
    lines += _checks(records)
    for note in dict.fromkeys(note for record in records for note in record.outcome.notes):
        lines += [note, ""]
    lines += _rows(records)
    left_out = first.outcome.left_out
    lines += [f"Left out: {name}: {why}." for name, why in left_out.items()]
    return "\n".join(lines) + "\n"


def _measured_with(records: list[Record]) -> list[str]:
    lines = []
    for record in records:
        words = [f"{name} {value}" for name, value in record.measured_with.items()]
        line = ("A quick run. " if record.quick else "") + ", ".join(words) + ".\n"
        lines += [] if line in lines else [line]
    frameworks = get_args(Framework)
    lines += [
        f"| allocator | limits | {' | '.join(frameworks)} |",
        "|---|---" + len(frameworks) * "|---" + "|",
    ]
    for record in records:
        limits = record.limits
        speeds = (
            f"{limits.gflops:.0f} GFLOP/s, {limits.gbytes:.0f} GB/s, "
            f"{limits.dispatch_us:.0f} µs a call"
        )
        found = (str(record.environments.get(name, "–")) for name in frameworks)
        lines.append(f"| {' | '.join([record.allocator, speeds, *found])} |")
    return [*lines, ""]


def _checks(records: list[Record]) -> list[str]:
    found = [(check, record.allocator) for record in records for check in record.outcome.checks]
    if not found:
        return []
    places = list(dict.fromkeys((check.problem, check.part) for check, _ in found))
    found.sort(key=lambda each: places.index((each[0].problem, each[0].part)))
    lines = ["| | | allocator | | measured | target | |", "|---|---|---|---|--:|--:|---|"]
    for check, allocator in found:
        where = f"{check.problem} | {check.part} | {allocator} | {check.what}"
        lines.append(f"| {where} | {check.measured} | {check.target} | {check.verdict} |")
    return [*lines, ""]


def _rows(records: list[Record]) -> list[str]:
    columns = [
        f"{record.allocator}: {column}"
        for record in records
        for column in ("time", "ratio", "of limit")
    ]
    columns += ["compile", "memory", "error", "gradients"]
    lines = [f"| | | | {' | '.join(columns)} |", "|---|---|---" + len(columns) * "|--:" + "|"]
    tables = [
        {(row.problem, row.part, row.name): row for row in record.outcome.rows}
        for record in records
    ]
    for key in dict.fromkeys(key for table in tables for key in table):
        row = next(table[key] for table in tables if key in table)
        times = [
            cell for table in tables for cell in time_cells(table.get(key), list(table.values()))
        ]
        cells = (
            row.problem,
            row.part,
            f"**{row.name}**" if row.name == OURS else row.name,
            *times,
            compile_cell(row),
            *other_cells(row),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]
