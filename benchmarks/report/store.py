"""Reads and writes the record of a family."""

import contextlib
import dataclasses
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.environment import ALLOCATORS, Allocator, Environment, processor
from benchmarks.outcome import Check, Outcome, Row
from benchmarks.problem import Framework, Limits
from twinscan.files import write_whole

PACKAGES = (
    *("jax", "flax", "optax", "torch", "numpy"),
    *("equinox", "dm-haiku", "keras", "recurrentgemma", "transformers"),
)


class BrokenRecord(ValueError):  # noqa: N818
    """Raised for a file that cannot be read; the message says why."""


@dataclasses.dataclass(frozen=True)
class Record:
    """The last measurement of a family on a platform with an allocator."""

    family: str
    title: str
    platform: str
    allocator: Allocator
    quick: bool
    measured_with: dict[str, Any]
    environments: dict[Framework, Environment]
    limits: Limits
    outcome: Outcome


def versions() -> dict[str, str | int]:
    """The processor, the number of cores, and the versions of Python and of packages."""
    found: dict[str, str | int] = {"processor": processor(), "cores": len(os.sched_getaffinity(0))}
    found["python"] = platform.python_version()
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def path(folder: Path, record: Record) -> Path:
    """The file of a record."""
    return folder / f"{record.family}-{record.platform}-{record.allocator}.json"


def plot_path(folder: Path, record: Record) -> Path:
    """The file of the plot for a family on a platform, with all allocators."""
    return folder / f"{record.family}-{record.platform}.png"


def write(folder: Path, record: Record) -> None:
    """Writes a record as JSON, in place of the last one for the same platform and allocator."""
    fields = dataclasses.asdict(record)
    fields["outcome"] = outcome_fields(record.outcome)
    write_whole(path(folder, record), json.dumps(fields, indent=1) + "\n")


def outcome_fields(outcome: Outcome) -> dict[str, Any]:
    """The fields of an outcome, for JSON."""
    checks = [{**dataclasses.asdict(c), "verdict": c.verdict} for c in outcome.checks]
    return dataclasses.asdict(outcome) | {"checks": checks}


def outcome_from(fields: dict[str, Any]) -> Outcome:
    """The outcome with the fields from `outcome_fields`."""
    checks = [{key: c[key] for key in c if key != "verdict"} for c in fields["checks"]]
    return Outcome(
        rows=[Row(**row) for row in fields["rows"]],
        checks=[Check(**check) for check in checks],
        left_out=dict(fields["left_out"]),
        notes=list(fields["notes"]),
    )


def read_all(folder: Path) -> list[Record]:
    """The records in a folder, those of the default allocator first. Other files are ignored.

    Raises:
        BrokenRecord: a file is damaged, or was written by another version.

    """
    found = []
    for file in sorted(folder.glob("*.json")):
        try:
            fields = json.loads(file.read_text())
            if "outcome" in fields:
                found.append(_record(fields))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BrokenRecord(
                f"{file}: expected a record of this version, got {error!r}; delete the file"
            ) from None
    return sorted(found, key=lambda record: ALLOCATORS.index(record.allocator))


def _record(fields: dict[str, Any]) -> Record:
    environments = fields.pop("environments")
    return Record(
        limits=Limits(**fields.pop("limits")),
        environments={name: Environment(**found) for name, found in environments.items()},
        outcome=outcome_from(fields.pop("outcome")),
        **fields,
    )
