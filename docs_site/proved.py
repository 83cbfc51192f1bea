"""Writes the page "What is proved" from the registry's records in `benchmarks/results/`."""

from collections import Counter
from collections.abc import Iterable

from docs_site.blocks import ROOT
from parity_tests.checks import CHECKS
from parity_tests.engine.problem import DTYPES
from parity_tests.registry import CASES, MUTATIONS
from parity_tests.report.record import Measurement, Record

RECORDS = ROOT / "benchmarks" / "results"
INTRODUCTION = """
# What is proved

Every layer and model has a twin in plain PyTorch, and the two are compared in float64, float32 and
bfloat16: outputs, final states, and the gradients of inputs and weights. All weights and biases are
random. The tables show the largest error of JAX in any of these groups, relative to the size of the
result, and the largest share of the bound that an error takes. A pair passes if no share is above
100 %. [How the bound is found](docs/design/bounds.md) says what it allows, and
`python -m parity_tests` makes the measurements again.
"""
CHECKED = """
## What else is checked

The tests run these checks, as far as they apply, on the first case of each architecture and on each
case in which a check must find a planted fault:

{checks}

A check that finds nothing proves nothing, so faults are planted on purpose: a swapped gate, a
transposed matrix, a mask that is off by one. `python -m parity_tests --mutations` plants all of
them, and every one must be caught.

| architecture | cases | planted faults |
|---|---|---|
{rows}
"""


def proved() -> str:
    """The page, with a table for each device, and a list of the checks."""
    records = [Record.from_json(p.read_bytes()) for p in sorted(RECORDS.glob("parity-*.json"))]
    faults = Counter(CASES[mutation.case].architecture for mutation in MUTATIONS)
    cases = Counter(case.architecture for case in CASES.values())
    rows = [f"| {_words(name)} | {cases[name]} | {faults[name]} |" for name in sorted(cases)]
    checks = [f"- {str(check.__doc__).splitlines()[0]}" for check in CHECKS.values()]
    checked = CHECKED.format(checks="\n".join(checks), rows="\n".join(rows))
    return "\n".join([INTRODUCTION.lstrip(), *map(_table, records), checked])


def _table(record: Record) -> str:
    """The section on a record: where and when it was measured, and a row for each architecture."""
    versions = dict(record.versions)
    device = versions.pop("device", "CPU")
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    passed = len(record.cases) - len(record.failing & record.cases.keys())
    dtypes = [d for d in DTYPES if any(m.dtype == d for m in record.measurements)]
    lines = [
        f"## On {device}\n",
        f"Measured on {record.date} with {software}. {passed} of {len(record.cases)} pairs "
        "agree.\n",
        "| architecture | pairs | " + " | ".join(dtypes) + " |",
        "|---|---|" + len(dtypes) * "---|",
    ]
    for architecture in sorted({*record.cases.values()}):
        names = [name for name, kind in record.cases.items() if kind == architecture]
        mine = [m for m in record.measurements if m.case in names]
        agree = len({*names} - record.failing)
        cells = [_cell(m for m in mine if m.dtype == dtype) for dtype in dtypes]
        row = [_words(architecture), f"{agree} of {len(names)}", *cells]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join([*lines, ""])


def _cell(measurements: Iterable[Measurement]) -> str:
    """The largest error, and the largest share of a bound, of some measurements."""
    errors = [m.error for m in measurements]
    if not errors:
        return "not compared"
    share = max(error.jax / error.bound for error in errors)
    return f"{max(error.jax for error in errors):.1e} ({share:.0%})"


def _words(name: str) -> str:
    return name.replace("_", " ")
