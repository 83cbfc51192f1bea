"""The calls of a reference's run, and how far rounding moves their arrays."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from parity_tests.engine.bounds.tolerance import K, raised, rms
from parity_tests.engine.locate.record import SLOTS, Call, Rows
from parity_tests.engine.locate.run import Run
from parity_tests.engine.results import replayed

Place = tuple[int, str, str]
"""The number of a call, a slot of it, and a label."""
Errors = dict[Place, float]
PLAIN = 1e3
"""An error in float64 of so many bounds is a fault, whatever random rounding explains."""


RunAgain = Callable[[int, Any, Collection[str], Sequence[np.ndarray]], list[Rows]]
"""What a call gives in a direction if each of some arrays replaces inputs of some labels."""


class OwnRun(NamedTuple):
    """The errors and dtypes of a reference's own run in a dtype."""

    errors: Errors
    dtypes: list[dict[str, set[str]]]
    """For each call, by slot: the dtypes of floating arrays, as the module computes them."""


@dataclasses.dataclass(frozen=True)
class ReferenceTrace:
    """A reference's run in float64, and its runs in a dtype, which are made on demand."""

    dtype: str
    run: Run
    owners: Mapping[str, str]
    """The key of each weight, or the first of the keys that share it."""
    own: Callable[[], OwnRun]
    rounded: Callable[[], Iterable[Errors]]
    """The errors of runs that are rounded to the dtype at random, each run once."""
    moved: Callable[[], Iterable[Errors]]
    """The errors of runs whose constants are off by their rounding to float32, each run once."""
    run_again: RunAgain | None = None
    """None if the reference cannot be run, such as a record."""
    cast_to: Sequence[str] = ()
    """The dtypes below float32 to which the reference casts; the float64 run ignores these."""

    @functools.cached_property
    def number(self) -> dict[Call, int]:
        """The place of each call in the run."""
        return {call: i for i, call in enumerate(self.run.trace.calls)}

    def bound(self, call: Call, slot: str, label: str, error: float, least: float) -> float:
        """The largest error that rounding explains; only as much is run as it takes to tell."""
        if error <= least or not np.isfinite(error):
            return least
        place = self.number[call], slot, label
        errors, bounds, plain = {place: error}, {place: least}, {place: np.inf}
        if self.dtype == "float64":  # its own run has casts that this one ignores
            bounds = raised(bounds, errors, self.moved(), plain)
            plain = {place: PLAIN * bounds[place]}
        else:
            bounds = {place: max(least, K * self.own().errors.get(place, 0.0))}
        return raised(bounds, errors, self.rounded(), plain)[place]

    def dtypes(self, call: Call, slot: str) -> set[str]:
        """The dtypes of a slot's floating arrays in the reference's own run."""
        return self.own().dtypes[self.number[call]][slot]


def of_runs(
    dtype: str,
    run: Run,
    owners: Mapping[str, str],
    own: Callable[[], Run],
    rounded: Iterable[Run],
    moved: Iterable[Run] = (),
    run_again: RunAgain | None = None,
) -> ReferenceTrace:
    """The trace of a reference that can be run again."""

    @functools.cache
    def of_own() -> OwnRun:
        again = own()
        dtypes = [{slot: c.dtypes_in(slot) for slot in SLOTS} for c in again.trace.calls]
        return OwnRun(errors_at(again, run), dtypes)

    errors = partial(errors_at, oracle=run)
    return ReferenceTrace(
        dtype,
        run,
        owners,
        of_own,
        replayed(map(errors, rounded)),
        replayed(map(errors, moved)),
        run_again,
    )


def largest(runs: Iterable[Errors]) -> Errors:
    """The largest error at each place."""
    most: Errors = {}
    for errors in runs:
        most |= {place: max(error, most.get(place, 0.0)) for place, error in errors.items()}
    return most


def errors_at(run: Run, oracle: Run) -> Errors:
    """How far a run is off wherever its array has the oracle's shape and the error is finite."""
    errors: Errors = {}
    for i, (call, true) in enumerate(zip(run.trace.calls, oracle.trace.calls, strict=False)):
        for slot, rows in true.slots.items():
            for label, expected in rows.items():
                actual = call.slots[slot].get(label)
                if actual is None or actual.shape != expected.shape:
                    continue
                with np.errstate(invalid="ignore", over="ignore"):
                    wide = complex if np.iscomplexobj(expected) else float
                    off = actual.astype(wide) - expected.astype(wide)
                    error = rms(off) / (rms(expected) or 1.0)
                if np.isfinite(error):
                    errors[i, slot, label] = error
    return errors
