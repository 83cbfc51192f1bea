"""A family's figures in a file."""

import contextlib
import dataclasses
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.outcome import Check, Outcome, Row
from benchmarks.problem import Limits

PACKAGES = (
    *("jax", "flax", "optax", "torch", "numpy"),
    *("equinox", "dm-haiku", "keras", "recurrentgemma", "transformers"),
)


@dataclasses.dataclass(frozen=True)
class Record:
    """A family on a platform, as it was measured last."""

    family: str
    title: str
    platform: str
    quick: bool
    measured_with: dict[str, Any]
    limits: Limits | None
    outcome: Outcome


def versions() -> dict[str, str | int]:
    """What the figures were measured with."""
    found: dict[str, str | int] = {"cores": len(os.sched_getaffinity(0))}
    found["python"] = platform.python_version()
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def path(folder: Path, record: Record, suffix: str) -> Path:
    """Its file."""
    return folder / f"{record.family}-{record.platform}.{suffix}"


def write(folder: Path, record: Record) -> None:
    """As JSON, in place of what the family had."""
    fields = dataclasses.asdict(record)
    fields["outcome"]["checks"] = [
        {**dataclasses.asdict(check), "verdict": check.verdict} for check in record.outcome.checks
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path(folder, record, "json").write_text(json.dumps(fields, indent=1) + "\n")


def read_all(folder: Path) -> list[Record]:
    """The records in a folder; files of other kinds are passed over."""
    found = []
    for file in sorted(folder.glob("*.json")):
        fields = json.loads(file.read_text())
        if "outcome" in fields:
            found.append(_record(fields))
    return found


def _record(fields: dict[str, Any]) -> Record:
    outcome = fields.pop("outcome")
    checks = [{key: c[key] for key in c if key != "verdict"} for c in outcome["checks"]]
    limits = fields.pop("limits")
    return Record(
        **fields,
        limits=limits and Limits(**limits),
        outcome=Outcome(
            rows=[Row(**row) for row in outcome["rows"]],
            checks=[Check(**check) for check in checks],
            left_out=outcome["left_out"],
            notes=outcome["notes"],
        ),
    )
