"""A family's figures in a file."""

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
    """A file that cannot be read, and why."""


@dataclasses.dataclass(frozen=True)
class Record:
    """A family on a platform with an allocator, as it was measured last."""

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
    """What the figures were measured with."""
    found: dict[str, str | int] = {"processor": processor(), "cores": len(os.sched_getaffinity(0))}
    found["python"] = platform.python_version()
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def path(folder: Path, record: Record) -> Path:
    """Its file."""
    return folder / f"{record.family}-{record.platform}-{record.allocator}.json"


def plot_path(folder: Path, record: Record) -> Path:
    """The picture of the family on the platform, with all allocators."""
    return folder / f"{record.family}-{record.platform}.png"


def write(folder: Path, record: Record) -> None:
    """As JSON, in place of what the family had on this platform with this allocator."""
    fields = dataclasses.asdict(record)
    fields["outcome"] = outcome_fields(record.outcome)
    write_whole(path(folder, record), json.dumps(fields, indent=1) + "\n")


def outcome_fields(outcome: Outcome) -> dict[str, Any]:
    """An outcome for JSON."""
    checks = [{**dataclasses.asdict(c), "verdict": c.verdict} for c in outcome.checks]
    return dataclasses.asdict(outcome) | {"checks": checks}


def outcome_from(fields: dict[str, Any]) -> Outcome:
    """The outcome that `outcome_fields` described."""
    checks = [{key: c[key] for key in c if key != "verdict"} for c in fields["checks"]]
    return Outcome(
        rows=[Row(**row) for row in fields["rows"]],
        checks=[Check(**check) for check in checks],
        left_out=dict(fields["left_out"]),
        notes=list(fields["notes"]),
    )


def read_all(folder: Path) -> list[Record]:
    """The records in a folder, the default allocator's first; other files are passed over.

    Raises:
        BrokenRecord: a file is none, or was written by another version.

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
