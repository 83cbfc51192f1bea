"""Writes the reports of your own pairs to a page or to JSON."""

from collections.abc import Mapping
from pathlib import Path

from parity_tests.engine.verdict.report import Report
from parity_tests.report.files import FORMS
from parity_tests.report.record import LogitsMeasurement, Measurement, Record, versions
from twinscan.files import write_whole


def save(reports: Report | Mapping[str, Report], path: str | Path) -> None:
    """Writes reports, by name, to a page (`.html`) or to JSON (`.json`), completely or not at all.

    Raises:
        ValueError: `path` has another suffix, or there is no report.
        TypeError: `reports` is neither a report nor a dict of reports.

    """
    named = {reports.twin: reports} if isinstance(reports, Report) else reports
    if not isinstance(named, Mapping) or not all(isinstance(r, Report) for r in named.values()):
        raise TypeError(
            f"reports: expected a report of `compare`, or a dict of reports, got {reports!r:.60}"
        )
    if not named:
        raise ValueError("reports: expected at least one")
    path = Path(path)
    if path.suffix not in FORMS:
        raise ValueError(f"path: expected a name ending in {' or '.join(FORMS)}, got {str(path)!r}")
    write_whole(path, FORMS[path.suffix](record_of(named)))


def record_of(reports: Mapping[str, Report]) -> Record:
    """A record of reports, by name."""
    measurements, tensors, logits, faults, notes, locations = [], [], [], [], [], {}
    for name, report in reports.items():
        place = name, report.platform
        for dtype, groups in report.tensors.items():
            for group, named in groups.items():
                worst = report.errors[dtype][group]
                measurements.append(Measurement(*place, dtype, group, worst))
                tensors += (Measurement(*place, dtype, group, error) for error in named.values())
        for dtype, sides in report.logits.items():
            logits += (LogitsMeasurement(*place, dtype, side, e) for side, e in sides.items())
        faults += (f"{name}, {report.platform}: {fault}" for fault in report.faults)
        notes += (f"{name}, {report.platform}: {note}" for note in report.notes)
        if report.location is not None:
            locations[name] = str(report.location)
    return Record(
        versions(),
        {report.platform: "ran" for report in reports.values()},
        tuple(measurements),
        tuple(faults),
        cases={name: report.twin for name, report in reports.items()},
        tensors=tuple(tensors),
        logits=tuple(logits),
        notes=tuple(notes),
        locations=locations,
    )
