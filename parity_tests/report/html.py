"""The report as one page of HTML, which asks the network for nothing.

All but the plots is there without the script, which sorts and filters the tables, and draws the
plots from the record that the page carries as JSON.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files

from parity_tests.engine.logits import COLUMNS as LOGITS
from parity_tests.engine.tolerance import FLOAT64, FLOOR_ULPS, UNSTABLE, K
from parity_tests.report.record import (
    LogitsMeasurement,
    Measurement,
    MutationResult,
    PrecisionError,
    Record,
)

COLUMNS = (
    "Case",
    "Verdict",
    "Platform",
    "Dtype",
    "Check",
    "Torch error",
    "JAX error",
    "Ratio",
    "Bound",
    "Bound used",
    "Worst tensor",
)
PRECISION_COLUMNS = (
    "Case",
    "Platform",
    "Products in",
    "Check",
    "Error at highest",
    "Error",
    "Times as large",
)


def page(record: Record) -> str:
    """The record as a page."""
    parts = {
        "style": _file("style.css"),
        "script": _file("filter.js") + _file("plot.js"),
        "record": json.dumps(record.to_dict(), separators=(",", ":")).replace("<", "\\u003c"),
        "state": "pass" if record.passed else "fail",
        "verdict": _verdict(record),
        "measurements": f"{len(record.measurements):,}",
        "faults": _list([*record.faults, *map(_missed, record.missed)], "faults", "Faults"),
        "planted": _planted(record),
        "platforms": _terms({**record.platforms, **_not_run(record)}),
        "versions": _terms(record.versions),
        "choices": _choices(record),
        "bounds": f"in float64 {FLOAT64:.0e}; in float32 and bfloat16 {K:.0f} times PyTorch’s own "
        f"error, or {K * FLOOR_ULPS:.0f} ulp where that is more; but as much as random rounding "
        "carries PyTorch, where the result is ill-conditioned",
        "unstable": f"{UNSTABLE:g}",
        "head": _head(COLUMNS),
        "rows": "\n".join(_row(m, record.cases) for m in record.measurements),
        "notes": _list(record.notes, "notes", "Notes"),
        "located": _located(record),
        "tensors": _tensors(record),
        "logits": _logits(record),
        "precision": _precision(record),
        "over_time": _over_time(record),
    }
    return _filled("page.html", parts)


def _filled(name: str, parts: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _file(name))


def _file(name: str) -> str:
    return files("parity_tests.report").joinpath("page", name).read_text(encoding="utf-8")


def _verdict(record: Record) -> str:
    failing = len(record.failing)
    agree = len(record.cases) - failing
    return (
        f"{agree} pair{'s agree' if agree != 1 else ' agrees'}; "
        f"{failing} fail{'s' if failing == 1 else ''}"
    )


def _planted(record: Record) -> str:
    total = len(record.mutations)
    return f" {total - len(record.missed)} of {total} planted faults caught." if total else ""


def _missed(m: MutationResult) -> str:
    return f"{m.case}: the planted fault “{m.name}” is not caught by {m.check or 'the twin'}"


def _list(lines: Iterable[str], kind: str, label: str) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="{kind}" aria-label="{label}">{items}</ul>' if items else ""


def _located(record: Record) -> str:
    return "".join(
        f"<details open><summary>{escape(case)}</summary><pre>{escape(text)}</pre></details>"
        for case, text in record.locations.items()
    )


def _terms(terms: Mapping[str, str]) -> str:
    return "".join(
        f"<div><dt>{escape(term)}</dt><dd>{escape(value)}</dd></div>"
        for term, value in terms.items()
    )


def _choices(record: Record) -> str:
    """A menu for each thing to filter by."""
    measured = record.measurements
    menus = {
        "architecture": record.cases.values(),
        "platform": (m.platform for m in measured),
        "dtype": (m.dtype for m in measured),
        "check": (m.group for m in measured),
    }
    return "".join(
        f'<label>{name.capitalize()}<select name="{name}"><option value="">all</option>'
        + "".join(f"<option>{escape(value)}</option>" for value in dict.fromkeys(values))
        + "</select></label>"
        for name, values in menus.items()
    )


def _not_run(record: Record) -> dict[str, str]:
    return {
        case: f"not run: on {' and '.join(platforms)} only"
        for case, platforms in record.not_run.items()
    }


def _head(columns: Iterable[str]) -> str:
    cells = "".join(f'<th scope="col" aria-sort="none">{column}</th>' for column in columns)
    return f"<thead><tr>{cells}</tr></thead>"


def _row(m: Measurement, cases: Mapping[str, str]) -> str:
    error = m.error
    bar = f'<span class="bar" style="--used:{min(error.share, 1):.3f}"></span>'
    mark, state = ("✓", "pass") if error.passed else ("✗", "FAIL")
    unstable = '<span class="unstable">unstable reference</span>' if error.unstable else ""
    cells = [
        _number(error.torch),
        _number(error.jax),
        _number(error.ratio, ".2f"),
        _number(error.bound),
        _number(error.share, ".0%", bar),
        f'<td class="tensor">{escape(error.tensor)}</td>',
    ]
    return (
        _tr(cases, m.case, platform=m.platform, dtype=m.dtype, check=m.group, verdict=state)
        + f'<td class="verdict">{mark} {error.verdict}{unstable}</td>'
        + "".join(f"<td>{escape(text)}</td>" for text in (m.platform, m.dtype, m.group))
        + "".join(cells)
        + "</tr>"
    )


def _tr(cases: Mapping[str, str], case: str, **filters: str) -> str:
    """The start of a row: what the filters look at, and the case."""
    data = {"case": case, "architecture": cases.get(case, ""), **filters}
    attributes = "".join(f' data-{name}="{escape(value)}"' for name, value in data.items())
    return f'<tr{attributes}><th scope="row">{escape(case)}</th>'


def _number(x: float | None, form: str = ".1e", after: str = "") -> str:
    """A cell, and the number to sort it by; what is not finite is larger than all that is."""
    if x is None:
        return '<td class="number" data-value="">–</td>'
    if not math.isfinite(x):
        return f'<td class="number" data-value="Infinity">not finite{after}</td>'
    return f'<td class="number" data-value="{x!r}">{x:{form}}{after}</td>'


def _section(
    name: str, title: str, label: str, text: str, columns: Iterable[str], rows: Iterable[str]
) -> str:
    """A section with a table; nothing if that has no rows."""
    body = "\n".join(rows)
    table = f"{_head(columns)}<tbody>\n{body}</tbody>"
    parts = {"id": name, "title": title, "label": label, "text": text, "table": table}
    return _filled("section.html", parts) if body else ""


def _tensors(record: Record) -> str:
    return _section(
        "tensors",
        "Tensors",
        "Errors of every tensor",
        "The same of every tensor, those first that take most of their bounds.",
        (*COLUMNS[:-1], "Tensor"),
        (
            _row(m, record.cases)
            for m in sorted(record.tensors, key=lambda m: m.error.share, reverse=True)
        ),
    )


def _logits(record: Record) -> str:
    return _section(
        "logits",
        "Logits",
        "Errors of the logits",
        "How far the next token’s distribution is from PyTorch’s in float64: the divergence in "
        "nats, the largest |Δ log p| of the vocabulary, each a token’s mean and the largest of "
        "all, and the share of the likeliest tokens that are the same.",
        ("Case", "Platform", "Dtype", "Side", *LOGITS),
        (_logits_row(m, record.cases) for m in record.logits),
    )


def _logits_row(m: LogitsMeasurement, cases: Mapping[str, str]) -> str:
    return (
        _tr(cases, m.case, platform=m.platform, dtype=m.dtype, check="outputs")
        + "".join(f"<td>{escape(text)}</td>" for text in (m.platform, m.dtype, m.side))
        + "".join(_number(getattr(m.error, name), form) for name, form in LOGITS.values())
        + "</tr>"
    )


def _precision(record: Record) -> str:
    return _section(
        "precision",
        "Precision of matrix products",
        "Errors by precision of matrix products",
        "What products of coarser operands cost in float32: errors against PyTorch in float64. The "
        "report itself is measured with products in full float32, the highest. “Emulated”: the "
        "platform’s own products do not round, so the operands were rounded before them.",
        PRECISION_COLUMNS,
        (_precision_row(p, record.cases) for p in record.precision),
    )


def _precision_row(p: PrecisionError, cases: Mapping[str, str]) -> str:
    emulated = ' <span class="note">emulated</span>' if p.emulated else ""
    return (
        _tr(cases, p.case, platform=p.platform, dtype="float32", check=p.group)
        + f"<td>{escape(p.platform)}</td><td>{escape(p.precision)}{emulated}</td>"
        + f"<td>{escape(p.group)}</td>{_number(p.highest)}{_number(p.error)}"
        + f"{_number(p.error / p.highest if p.highest else None, ',.0f')}</tr>"
    )


def _over_time(record: Record) -> str:
    """A figure for each case and platform, for the script to draw in."""
    places = dict.fromkeys((e.case, e.platform) for e in record.over_time)
    return "\n".join(
        f'<figure tabindex="-1" data-case="{escape(case)}" data-platform="{escape(platform)}">'
        f"<figcaption>{escape(case)} <span>{escape(platform)}</span></figcaption></figure>"
        for case, platform in places
    )
