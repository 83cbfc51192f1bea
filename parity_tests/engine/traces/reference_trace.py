"""The calls of a reference's run, and how far rounding moves their arrays."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from parity_tests.engine.bounds.tolerance import K, difference, raise_bounds, rms, ulp
from parity_tests.engine.problem import Arrays
from parity_tests.engine.traces.trace import Call, Trace

Place = tuple[int, str, str]
"""The place of an array in a trace: the index of a call, a slot of the call, and a label."""
Errors = dict[Place, float]
RunAgain = Callable[[int, Any, Sequence[Arrays]], list[Arrays]]
"""`run_again(index, direction, replacements)` runs the call at `index` once for each replacement.
Its arrays replace those that the call takes under their labels.
"""
TraceWith = Callable[[int, Arrays], Trace]
"""`trace_with(index, outputs)` has the calls of the forward pass if the one at `index` gives other
outputs."""


class OwnRun(NamedTuple):
    """The errors and dtypes of a reference's own run in a dtype."""

    errors: Errors
    dtypes: list[dict[str, set[str]]]
    """For each call, by slot: the dtypes of floating arrays, as the module computes them."""


@dataclasses.dataclass(frozen=True)
class ReferenceTrace:
    """A reference's run in float64, and its runs in a dtype, which are made on demand."""

    dtype: str
    trace: Trace
    owners: Mapping[str, str]
    """The key of each weight, or the first of the keys that share it."""
    own_run: Callable[[], OwnRun]
    rounded_errors: Callable[[], Iterable[Errors]]
    """The errors of runs that are rounded to the dtype at random, each run once."""
    moved_errors: Callable[[], Iterable[Errors]]
    """The errors of runs whose constants are off by their rounding to float32, each run once."""
    run_again: RunAgain | None = None
    """None if the reference cannot be run, such as a record."""
    trace_with: TraceWith | None = None
    """None if the reference cannot be run in this way."""
    cast_to: Sequence[str] = ()
    """The dtypes below float32 to which the reference casts; the float64 run ignores these."""

    def bound(self, call: Call, slot: str, label: str, error: float, min_bound: float) -> float:
        """The largest error that rounding explains.

        The reference runs again only as often as needed to decide whether `error` is within it.
        """
        if error <= min_bound or not np.isfinite(error):
            return min_bound
        place = call.index, slot, label
        errors, bounds, clear_excess = {place: error}, {place: min_bound}, {place: np.inf}
        if self.dtype == "float64":  # the own run does not count: it casts to float32
            bounds = raise_bounds(bounds, errors, self.moved_errors(), clear_excess)
            clear_excess = {place: ulp(np.float32)}
        else:
            bounds = {place: max(min_bound, K * self.own_run().errors.get(place, 0.0))}
        return raise_bounds(bounds, errors, self.rounded_errors(), clear_excess)[place]

    def dtypes(self, call: Call, slot: str) -> set[str]:
        """The dtypes of a slot's floating arrays in the reference's own run."""
        return self.own_run().dtypes[call.index][slot]


def own_run(trace: Trace, oracle: Trace) -> OwnRun:
    """The errors and dtypes of a traced run in a dtype; `oracle` is the run in float64."""
    dtypes = [{s: {*each.values()} for s, each in c.dtypes.items()} for c in trace.calls]
    return OwnRun(errors_at(trace, oracle), dtypes)


def largest_errors(runs: Iterable[Errors]) -> Errors:
    """The largest error of any run at each place."""
    most: Errors = {}
    for errors in runs:
        most |= {place: max(error, most.get(place, 0.0)) for place, error in errors.items()}
    return most


def errors_at(trace: Trace, oracle: Trace) -> Errors:
    """The error of each array of a run that has the oracle's shape, if the error is finite."""
    errors: Errors = {}
    for call, true in zip(trace.calls, oracle.calls, strict=False):
        for slot, arrays in true.slots.items():
            for label, expected in arrays.items():
                actual = call.slots[slot].get(label)
                if actual is None or actual.shape != expected.shape:
                    continue
                with np.errstate(invalid="ignore", over="ignore"):
                    error = rms(difference(actual, expected)) / (rms(expected) or 1.0)
                if np.isfinite(error):
                    errors[true.index, slot, label] = error
    return errors
