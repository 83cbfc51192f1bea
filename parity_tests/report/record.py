"""The report as JSON, and what moved between two reports."""

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
"""The version of the JSON; `docs/parity-report.md` describes it."""

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


@dataclasses.dataclass(frozen=True)
class PrecisionError:
    """What coarser matrix products cost a case in float32, relative to the float64 twin."""

    case: str
    platform: str
    precision: str
    """What an operand of a product is rounded to: "bfloat16" or "tensorfloat32"."""
    emulated: bool
    """Rounded by `lax.reduce_precision`, where the platform's products do not round."""
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
    """How far one side's logits are in a dtype."""

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
    """All of a report."""

    versions: Mapping[str, str]
    platforms: Mapping[str, str]
    """"ran", "not asked for" or "not on this machine", by name."""
    measurements: tuple[Measurement, ...]
    faults: tuple[str, ...] = ()
    """Failures other than numerical errors."""
    precision: tuple[PrecisionError, ...] = ()
    cases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Each case's architecture."""
    over_time: tuple[ErrorOverTime, ...] = ()
    """Each case's errors over time; cases with a fault have none."""
    mutations: tuple[MutationResult, ...] = ()
    not_run: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """The cases that run on none of these platforms, and those that they run on."""
    tensors: tuple[Measurement, ...] = ()
    """Every tensor of a person's own pairs."""
    logits: tuple[LogitsMeasurement, ...] = ()
    notes: tuple[str, ...] = ()
    """What was not compared."""
    locations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Where failing cases first depart."""
    done: tuple[str, ...] = ()
    """What has been measured so far, if the record is not finished."""

    def only(self, **fields: Any) -> "Record":
        """A record of the same machine with nothing but these fields."""
        return Record(self.versions, self.platforms, **{"measurements": (), **fields})

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
        return {
            case
            for case, platform in itertools.product(self.cases, self.platforms)
            if any(fault.startswith(f"{case}, {platform}: ") for fault in self.faults)
        }

    @property
    def failing(self) -> set[str]:
        """The cases that have a fault, or an error beyond its bound."""
        return self.faulty | {m.case for m in self.measurements if not m.error.passed}

    def to_dict(self) -> dict[str, Any]:
        """The record for JSON."""
        return {"schema": SCHEMA, **as_fields(self)}

    def to_json(self) -> str:
        """The record as text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> "Record":
        """The record that `to_json` wrote.

        Raises:
            ValueError: it is none, or of another schema.

        """
        try:
            fields = json.loads(text)
            if fields["schema"] != SCHEMA:
                raise ValueError(f"expected schema {SCHEMA}, got {fields['schema']!r:.40}")
            return from_fields(cls, fields)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a record of --json ({type(error).__name__}: {error})") from error


INLINED: dict[type, dict[str, str]] = {
    Error: {"jax": "jax_error", "torch": "torch_error", "unstable": "unstable_reference"},
    LogitsError: {},
}
"""Classes whose fields stand among those of the entry around them, and the names of these."""


def as_fields(value: Any) -> Any:
    """A value for JSON, which has no NaN and no infinity: they are null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, tuple):
        return [*map(as_fields, value)]
    if isinstance(value, Mapping):
        return {name: as_fields(each) for name, each in value.items()}
    if not dataclasses.is_dataclass(value):
        return value
    names, fields = INLINED.get(type(value), {}), {}
    for name, each in vars(value).items():
        inner = as_fields(each)
        fields |= inner if type(each) in INLINED else {names.get(name, name): inner}
    if isinstance(value, Error):
        fields |= {"ratio": as_fields(value.ratio), "verdict": value.verdict}
    return fields


def from_fields(kind: Any, value: Any) -> Any:
    """The value of this type that `as_fields` wrote; a field that is absent has its default."""
    if kind is float:
        return math.nan if value is None else float(value)
    origin, arguments = get_origin(kind), get_args(kind)
    hints = get_type_hints(kind) if dataclasses.is_dataclass(kind) else None
    expected = {tuple: list, Mapping: dict}.get(origin, kind if hints is None else dict)
    if not isinstance(value, expected):
        raise TypeError(f"expected {expected}, got {value!r:.40}")
    if origin is tuple:
        return tuple(from_fields(arguments[0], each) for each in value)
    if origin is Mapping:
        return {name: from_fields(arguments[1], each) for name, each in value.items()}
    if hints is None:
        return value
    names, fields = INLINED.get(kind, {}), {}
    for name, inner in hints.items():
        written = names.get(name, name)
        if inner in INLINED or written in value:
            fields[name] = from_fields(inner, value if inner in INLINED else value[written])
    return kind(**fields)


def merged(records: Sequence[Record]) -> Record:
    """One record of all, in their order."""
    first, *others = records or [Record(versions(), {}, ())]
    result: dict[str, Any] = dict(vars(first))
    for record in others:
        for name, value in vars(record).items():
            mine = result[name]
            result[name] = {**mine, **value} if isinstance(mine, Mapping) else mine + value
    return Record(**result)


def versions() -> dict[str, str]:
    """The versions of the packages that measure."""
    packages = ("jax", "flax", "numpy", "torch")
    found = {name: importlib.metadata.version(name) for name in packages}
    return {"python": machine.python_version(), **found}


def moved(old: Record, new: Record) -> list[str]:
    """What changed from one record to another in the cases of both, a line each."""
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
