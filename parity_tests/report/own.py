"""A person's own reports as a record, a page, or JSON."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from parity_tests.engine.report import Report
from parity_tests.report.files import FORMS
from parity_tests.report.record import LogitsMeasurement, Measurement, Record, versions
from twinscan.files import write_whole


def save(reports: Report | Mapping[str, Report], path: str | Path) -> None:
    """Write reports, by name, to a page (`.html`) or to JSON (`.json`), whole or not at all.

    Raises:
        ValueError: the name ends in another way, or there is no report.
        TypeError: something is no report.

    """
    named = {reports.twin: reports} if isinstance(reports, Report) else reports
    if not isinstance(named, Mapping) or not all(isinstance(r, Report) for r in named.values()):
        raise TypeError(
            f"reports: expected one of `compare`, or a dict of them, got {reports!r:.60}"
        )
    if not named:
        raise ValueError("reports: expected at least one")
    path = Path(path)
    if path.suffix not in FORMS:
        raise ValueError(f"path: expected a name in {' or '.join(FORMS)}, got {str(path)!r}")
    write_whole(path, FORMS[path.suffix](record_of(named)))


def record_of(reports: Mapping[str, Report]) -> Record:
    """A record of reports, by name."""
    items = reports.items()
    return Record(
        versions(),
        {report.platform: "ran" for report in reports.values()},
        tuple(
            Measurement(name, report.platform, dtype, group, error)
            for name, report in items
            for dtype, groups in report.errors.items()
            for group, error in groups.items()
        ),
        _lines(reports, lambda report: report.faults),
        cases={name: report.twin for name, report in items},
        tensors=tuple(
            Measurement(name, report.platform, dtype, group, error)
            for name, report in items
            for dtype, groups in report.tensors.items()
            for group, named in groups.items()
            for error in named.values()
        ),
        logits=tuple(
            LogitsMeasurement(name, report.platform, dtype, side, error)
            for name, report in items
            for dtype, sides in report.logits.items()
            for side, error in sides.items()
        ),
        notes=_lines(reports, lambda report: report.notes),
        locations={
            name: str(report.location) for name, report in items if report.location is not None
        },
    )


def _lines(reports: Mapping[str, Report], of: Callable[[Report], Iterable[str]]) -> tuple[str, ...]:
    def lines() -> Iterator[str]:
        for name, report in reports.items():
            yield from (f"{name}, {report.platform}: {line}" for line in of(report))

    return tuple(lines())
