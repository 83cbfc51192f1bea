"""The calls of a reference as arrays and JSON, and back."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from parity_tests.engine.locate.record import SLOTS, Call, Trace
from parity_tests.engine.locate.reference_trace import OwnRun, Place, ReferenceTrace, largest
from parity_tests.engine.locate.run import Run
from parity_tests.engine.problem import Arrays
from parity_tests.engine.results import Results


def calls_as_facts(told: Sequence[ReferenceTrace], arrays: Arrays) -> dict[str, Any]:
    """The calls of one run, and its rounding in some dtypes; their arrays are added to `arrays`."""
    trace, number = told[0].run.trace, told[0].number
    arrays |= {_name(place): _at(trace, place) for place in _places(trace)}
    for theirs in told:
        errors = [theirs.own().errors, largest(theirs.rounded()), largest(theirs.moved())]
        found = [[each.get(place, 0.0) for place in _places(trace)] for each in errors]
        arrays[_rounding(theirs.dtype)] = np.array(found)
    return {
        "calls": [
            {
                "name": call.name,
                "kind": call.kind,
                "parent": None if call.parent is None else number[call.parent],
                "weights": sorted(call.weights),
                "shapes": call.shapes,
                "hyperparameters": call.hyperparameters,
                "sources": sorted(number[source] for source in call.sources),
                "labels": [[*call.slots[slot]] for slot in SLOTS],
            }
            for call in trace.calls
        ],
        "events": [[number[call], SLOTS.index(slot)] for call, slot in trace.events],
        "dtypes": {
            theirs.dtype: [
                [sorted(of_call[slot]) for slot in SLOTS] for of_call in theirs.own().dtypes
            ]
            for theirs in told
        },
    }


def calls_of(
    facts: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    oracle: Results,
    owners: Mapping[str, str],
    dtype: str,
) -> ReferenceTrace:
    """The trace that `calls_as_facts` was given, of a run with these results."""
    trace = Trace()
    for i, each in enumerate(facts["calls"]):
        call = Call(
            each["name"],
            each["kind"],
            None if each["parent"] is None else trace.calls[each["parent"]],
            frozenset(each["weights"]),
            tuple(map(tuple, each["shapes"])),
            each.get("hyperparameters", {}),
        )
        for slot, labels in zip(SLOTS, each["labels"], strict=True):
            call.slots[slot] = {label: arrays[_name((i, slot, label))] for label in labels}
        trace.calls.append(call)
    for call, each in zip(trace.calls, facts["calls"], strict=True):
        call.sources = {trace.calls[i] for i in each["sources"]}
    trace.events = [(trace.calls[i], SLOTS[slot]) for i, slot in facts["events"]]
    own, rounded, moved = (
        dict(zip(_places(trace), errors.tolist(), strict=True))
        for errors in arrays[_rounding(dtype)]
    )
    dtypes = [
        {slot: {*found} for slot, found in zip(SLOTS, of_call, strict=True)}
        for of_call in facts["dtypes"][dtype]
    ]
    run = Run(oracle, trace, trace.calls[0])
    return ReferenceTrace(
        dtype, run, owners, lambda: OwnRun(own, dtypes), lambda: [rounded], lambda: [moved]
    )


def _places(trace: Trace) -> list[Place]:
    """Where the calls of a run have arrays."""
    return [
        (i, slot, label)
        for i, call in enumerate(trace.calls)
        for slot in SLOTS
        for label in call.slots[slot]
    ]


def _at(trace: Trace, place: Place) -> np.ndarray:
    i, slot, label = place
    return trace.calls[i].slots[slot][label]


def _name(place: Place) -> str:
    return "calls/{}/{}/{}".format(*place)


def _rounding(dtype: str) -> str:
    return f"rounding/{dtype}"
