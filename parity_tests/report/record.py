"""Converts the report to JSON and back, and finds the changes between two reports."""

import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import math
import platform as machine
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin, get_type_hints

from parity_tests.engine.bounds.tolerance import Error
from parity_tests.engine.logits import LogitsError

SCHEMA = 2
"""The version of the JSON format, which `docs/design/parity_report.md` describes."""

ERROR_KEYS = {
    "torch_error": "torch",
    "jax_error": "jax",
    "ratio": "ratio",
    "bound": "bound",
    "unstable_reference": "unstable",
    "tensor": "tensor",
    "verdict": "verdict",
}
"""The attribute of an `Error` that each key of the JSON holds."""

FACTOR = 2.0
"""An error counts as moved if it changed by more than this factor and came near its bound."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The error of one group of tensors: a cell of the report's table."""

    case: str
    platform: str
    dtype: str
    group: str
    error: Error

    @property
    def key(self) -> str:
        """A text that identifies the measurement."""
        return f"{self.case}, {self.platform}, {self.dtype}, {self.group}"


@dataclasses.dataclass(frozen=True)
class PrecisionError:
    """The error of coarser matrix products in float32, relative to the float64 twin."""

    case: str
    platform: str
    precision: str
    """The format to which operands are rounded: "bfloat16" or "tensorfloat32"."""
    emulated: bool
    """True if `lax.reduce_precision` rounds because the platform's own products do not."""
    group: str
    error: float
    highest: float
    """The error with products in full float32."""


@dataclasses.dataclass(frozen=True)
class ErrorOverTime:
    """The errors at each step of a longer sequence, relative to the float64 twin at that step."""

    case: str
    platform: str
    dtype: str
    torch: tuple[float, ...]
    jax: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class LogitsMeasurement:
    """The error of one side's logits in a dtype."""

    case: str
    platform: str
    dtype: str
    side: str
    """"torch" or "JAX"."""
    error: LogitsError


@dataclasses.dataclass(frozen=True)
class MutationResult:
    """Whether a planted fault was caught."""

    name: str
    case: str
    kind: str
    check: str | None
    """The check that must find the fault; None means the comparison with the twin."""
    caught: bool


@dataclasses.dataclass(frozen=True)
class Record:
    """All measurements of a report."""

    versions: Mapping[str, str]
    platforms: Mapping[str, str]
    """For each platform, "ran", "not asked for" or "not on this machine"."""
    measurements: tuple[Measurement, ...]
    faults: tuple[str, ...] = ()
    """Failures other than numerical errors."""
    precision: tuple[PrecisionError, ...] = ()
    cases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Each case's architecture."""
    over_time: tuple[ErrorOverTime, ...] = ()
    """The errors of each case at each step; cases with a fault have none."""
    mutations: tuple[MutationResult, ...] = ()
    not_run: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """The platforms of each case that did not run, because no platform that was measured has it."""
    tensors: tuple[Measurement, ...] = ()
    """The errors of every tensor, for a user's own pairs."""
    logits: tuple[LogitsMeasurement, ...] = ()
    notes: tuple[str, ...] = ()
    """Remarks, such as those on results that were not compared."""
    locations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """A description of where each failing case first departs."""
    done: tuple[str, ...] = ()
    """The names of the measurements so far, if the record is unfinished."""
    date: str = ""
    """The day on which the registry's measurements began, such as 2026-11-27."""

    @property
    def passed(self) -> bool:
        """True if every pair is within its bounds and every planted fault is caught."""
        within = not self.faults and all(m.error.passed for m in self.measurements)
        return within and not self.missed

    @property
    def missed(self) -> list[MutationResult]:
        """The planted faults that were not caught."""
        return [m for m in self.mutations if not m.caught]

    @property
    def faulty(self) -> set[str]:
        """The cases that have a fault."""
        return {case for case, _ in self.faulty_places}

    @property
    def faulty_places(self) -> set[tuple[str, str]]:
        """The case and the platform of each fault."""
        return {
            (case, platform)
            for case, platform in itertools.product(self.cases, self.platforms)
            if any(fault.startswith(f"{case}, {platform}: ") for fault in self.faults)
        }

    @property
    def failing(self) -> set[str]:
        """The cases that have a fault, or an error beyond its bound."""
        return self.faulty | {m.case for m in self.measurements if not m.error.passed}

    def to_json(self) -> str:
        """The record as JSON."""
        fields = {"schema": SCHEMA, **encode(vars(self))}
        return json.dumps(fields, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> "Record":
        """The record that `to_json` wrote.

        Raises:
            ValueError: the text is not a record, or has another schema.

        """
        try:
            fields = json.loads(text)
            if (schema := fields.pop("schema")) != SCHEMA:
                raise ValueError(f"expected schema {SCHEMA}, got {schema!r:.40}")
            return decode(cls, fields)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a record of --json ({type(error).__name__}: {error})") from error


def encode(value: Any) -> Any:
    """The value for JSON. JSON has no NaN and no infinity, so these become null.

    The fields of an error stand beside those of its measurement.
    """
    if isinstance(value, Error):
        return encode({key: getattr(value, name) for key, name in ERROR_KEYS.items()})
    if dataclasses.is_dataclass(value):
        fields = encode(vars(value))
        error = fields.pop("error") if isinstance(fields.get("error"), dict) else {}
        return fields | error
    if isinstance(value, Mapping):
        return {key: encode(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [*map(encode, value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def decode(kind: Any, value: Any) -> Any:
    """The value of this type that `encode` wrote; null becomes NaN."""
    type_arguments = get_args(kind)
    if kind is float:
        return math.nan if value is None else float(value)
    if get_origin(kind) is tuple:
        return tuple(decode(type_arguments[0], each) for each in value)
    if get_origin(kind) is Mapping:
        return {key: decode(type_arguments[1], each) for key, each in value.items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        keys = {name: key for key, name in ERROR_KEYS.items()} if kind is Error else {}
        fields = {}
        for name, hint in get_type_hints(kind).items():
            key = keys.get(name, name)
            if dataclasses.is_dataclass(hint):
                fields[name] = decode(hint, value)
            elif key in value:
                fields[name] = decode(hint, value[key])
        return kind(**fields)
    if not isinstance(value, kind):
        raise TypeError(f"expected a {kind}, got {value!r:.40}")
    return value


def join_records(records: Sequence[Record]) -> Record:
    """One record that joins several, in order."""
    first, *others = records or [Record(versions(), {}, ())]
    result: dict[str, Any] = dict(vars(first))
    for record in others:
        for name, value in vars(record).items():
            mine = result[name]
            result[name] = {**mine, **value} if isinstance(mine, Mapping) else mine + value
    return Record(**result)


def versions() -> dict[str, str]:
    """The versions of Python and of the installed packages that the measurements depend on."""
    found = {"python": machine.python_version()}
    for name in ("jax", "flax", "numpy", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def changes(old: Record, new: Record) -> list[str]:
    """A line for each change between two records in the cases that both have."""
    # Versions and platforms that changed may explain the other changes, so they come first.
    lines = []
    for what in ("versions", "platforms"):
        a, b = getattr(old, what), getattr(new, what)
        lines += [
            f"{name}: {a.get(name, 'none')} → {b.get(name, 'none')}"
            for name in sorted({*a, *b})
            if a.get(name) != b.get(name)
        ]
    lines += [f"new: {fault}" for fault in new.faults if fault not in old.faults]
    caught = {m for m in old.mutations if m.caught}
    lines += [
        f"{m.case}, {m.name}: not caught any more"
        for m in new.missed
        if dataclasses.replace(m, caught=True) in caught
    ]
    both = old.cases.keys() & {*new.cases, *new.not_run}
    before, after = (
        {m.key: m.error for m in record.measurements if m.case in both} for record in (old, new)
    )
    lines += [f"{key}: not measured any more" for key in before if key not in after]
    lines += [f"{key}: new, {e.verdict}" for key, e in after.items() if key not in before]
    for key in filter(after.__contains__, before):
        a, b = before[key], after[key]
        if a.verdict != b.verdict or _has_moved(a, b):
            verdicts = a.verdict if a.verdict == b.verdict else f"{a.verdict} → {b.verdict}"
            lines.append(f"{key}: {a.jax:.1e} → {b.jax:.1e}, {verdicts}")
    return lines


def _has_moved(a: Error, b: Error) -> bool:
    small, large = sorted((a.jax, b.jax))
    return large > FACTOR * small and large > 0.1 * max(a.bound, b.bound)
