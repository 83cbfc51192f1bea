"""Converts the calls of a reference to arrays and JSON, and back."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from parity_tests.engine.problem import Arrays
from parity_tests.engine.results import Results
from parity_tests.engine.traces.reference_trace import OwnRun, Place, ReferenceTrace, largest_errors
from parity_tests.engine.traces.trace import SLOTS, Call, Trace


def calls_as_facts(references: Sequence[ReferenceTrace], arrays: Arrays) -> dict[str, Any]:
    """The calls of a run, and their rounding errors in some dtypes, as JSON.

    `references` holds the same run once for each dtype. The arrays of the calls are added to
    `arrays`.
    """
    # All dtypes share the float64 run, so its arrays are stored once; errors are stored per dtype.
    trace = references[0].trace
    places = _places(trace)
    arrays |= {
        _array_name(i, slot, label): trace.calls[i].slots[slot][label] for i, slot, label in places
    }
    for each in references:
        errors = [
            each.own_run().errors,
            largest_errors(each.rounded_errors()),
            largest_errors(each.moved_errors()),
        ]
        arrays[f"rounding/{each.dtype}"] = np.array(
            [[by_place.get(place, 0.0) for place in places] for by_place in errors]
        )
    return {
        "calls": [
            {
                "name": call.name,
                "kind": call.kind,
                "function": call.function,
                "parent": None if call.parent is None else call.parent.index,
                "weights": sorted(call.weights),
                "hyperparameters": call.hyperparameters,
                "sources": sorted(source.index for source in call.sources),
                "labels": [[*call.slots[slot]] for slot in SLOTS],
                "differentiated": sorted(call.differentiated),
            }
            for call in trace.calls
        ],
        "dtypes": {
            each.dtype: [
                [sorted(by_slot[slot]) for slot in SLOTS] for by_slot in each.own_run().dtypes
            ]
            for each in references
        },
    }


def recorded_calls(
    facts: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    oracle: Results,
    owners: Mapping[str, str],
    dtype: str,
) -> ReferenceTrace:
    """The trace in a dtype that `calls_as_facts` was given; `oracle` has the results of its run."""
    trace = Trace(results=oracle)
    for i, each in enumerate(facts["calls"]):
        parent = None if each["parent"] is None else trace.calls[each["parent"]]
        call = Call(
            each["name"],
            each["kind"],
            i,
            parent,
            each["function"],
            frozenset(each["weights"]),
            each["hyperparameters"],
            differentiated={*map(tuple, each["differentiated"])},
        )
        for slot, labels in zip(SLOTS, each["labels"], strict=True):
            call.slots[slot] = {label: arrays[_array_name(i, slot, label)] for label in labels}
        trace.calls.append(call)
    for call, each in zip(trace.calls, facts["calls"], strict=True):
        call.sources = {trace.calls[i] for i in each["sources"]}
    own, rounded, moved = (
        dict(zip(_places(trace), errors.tolist(), strict=True))
        for errors in arrays[f"rounding/{dtype}"]
    )
    dtypes = [
        {slot: {*found} for slot, found in zip(SLOTS, by_slot, strict=True)}
        for by_slot in facts["dtypes"][dtype]
    ]
    return ReferenceTrace(
        dtype, trace, owners, lambda: OwnRun(own, dtypes), lambda: [rounded], lambda: [moved]
    )


def _places(trace: Trace) -> list[Place]:
    """The places of all arrays of a run, in a fixed order."""
    return [
        (c.index, slot, label) for c in trace.calls for slot in SLOTS for label in c.slots[slot]
    ]


def _array_name(*place: int | str) -> str:
    return "calls/{}/{}/{}".format(*place)
