"""The report as JSON, and what moved between two reports."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from parity_tests.tolerance import Error

SCHEMA = 1
"""Of the JSON; `docs/parity-report.md` describes it."""

FACTOR = 2.0
"""An error has moved that is this many times another, and not far below its bound."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One group of one row of the table."""

    case: str
    platform: str
    dtype: str
    group: str
    error: Error

    @property
    def key(self) -> str:
        """What it measures."""
        return f"{self.case}, {self.platform}, {self.dtype}, {self.group}"

    @property
    def verdict(self) -> str:
        """Is the error within its bound?"""
        return "pass" if self.error.passed else "FAIL"

    def to_dict(self) -> dict[str, Any]:
        """The measurement for JSON, which has no NaN and no infinity: they are null."""
        error = self.error
        return {
            "case": self.case,
            "platform": self.platform,
            "dtype": self.dtype,
            "group": self.group,
            "torch_error": _number(error.torch),
            "jax_error": _number(error.jax),
            "ratio": _number(error.ratio),
            "bound": _number(error.bound),
            "unstable_reference": error.unstable,
            "worst_tensor": error.worst,
            "passed": error.passed,
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Measurement":
        """The measurement that `to_dict` wrote."""
        jax, torch, bound = (
            math.nan if fields[name] is None else float(fields[name])
            for name in ("jax_error", "torch_error", "bound")
        )
        error = Error(jax, torch, bound, fields["unstable_reference"], fields["worst_tensor"])
        return cls(fields["case"], fields["platform"], fields["dtype"], fields["group"], error)


@dataclasses.dataclass(frozen=True)
class Record:
    """All of a report."""

    versions: Mapping[str, str]
    platforms: Mapping[str, str]
    """"ran", "not asked for" or "not on this machine", by name."""
    measurements: tuple[Measurement, ...]
    faults: tuple[str, ...] = ()
    """What no error can say."""

    @property
    def passed(self) -> bool:
        """Is every pair within its bounds?"""
        return not self.faults and all(m.error.passed for m in self.measurements)

    def to_json(self) -> str:
        """The record as text."""
        fields = {
            "schema": SCHEMA,
            "versions": dict(self.versions),
            "platforms": dict(self.platforms),
            "faults": list(self.faults),
            "measurements": [m.to_dict() for m in self.measurements],
        }
        return json.dumps(fields, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Record":
        """The record that `to_json` wrote.

        Raises:
            ValueError: it is none, or of another schema.

        """
        try:
            fields = json.loads(text)
            if fields["schema"] != SCHEMA:
                raise ValueError(f"expected schema {SCHEMA}, got {fields['schema']}")
            return cls(
                fields["versions"],
                fields["platforms"],
                tuple(Measurement.from_dict(m) for m in fields["measurements"]),
                tuple(fields["faults"]),
            )
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"not a record of --json ({type(error).__name__}: {error})") from error


def moved(old: Record, new: Record) -> list[str]:
    """What changed from one record to another, a line each."""
    lines = [
        f"{name}: {old.versions.get(name, 'none')} → {new.versions.get(name, 'none')}"
        for name in sorted({*old.versions, *new.versions})
        if old.versions.get(name) != new.versions.get(name)
    ]
    before, after = ({m.key: m for m in record.measurements} for record in (old, new))
    lines += [f"{key}: not measured any more" for key in before if key not in after]
    lines += [f"{key}: new, {m.verdict}" for key, m in after.items() if key not in before]
    for key in before.keys() & after.keys():
        a, b = before[key], after[key]
        if a.verdict != b.verdict or _has_moved(a.error, b.error):
            verdicts = a.verdict if a.verdict == b.verdict else f"{a.verdict} → {b.verdict}"
            lines.append(f"{key}: {a.error.jax:.1e} → {b.error.jax:.1e}, {verdicts}")
    return lines


def _has_moved(a: Error, b: Error) -> bool:
    small, large = sorted((a.jax, b.jax))
    return large > FACTOR * small and large > 0.1 * max(a.bound, b.bound)


def _number(x: float | None) -> float | None:
    return x if x is not None and math.isfinite(x) else None
