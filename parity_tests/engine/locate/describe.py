"""Describe where two sides depart, for the report."""

import dataclasses
from collections.abc import Iterator
from functools import partial

from parity_tests.engine.locate.evidence import DEPARTS, Evidence
from parity_tests.engine.locate.location import Location, Visit
from parity_tests.engine.locate.rule import Culprit
from parity_tests.engine.traces.hyperparameters import hyperparameter_differences
from parity_tests.engine.traces.trace import FORWARD, Call, Trace


def departure(evidence: Evidence, culprit: Culprit) -> Location:
    """The report of the first departure."""
    # List the compared calls up to the culprit, except those inside a call that is right.
    direction = evidence.direction
    visits = []
    for call in _calls_to_report(evidence):
        states = (evidence.state(call, slot) for slot in (direction.incoming, direction.outgoing))
        if not any(evidence.is_right(outer) for outer in call.ancestors):
            visits.append(_visit(evidence, call, DEPARTS in states))
        if call in (culprit.before, culprit.call):
            break
    title = partial(_title, evidence.trace)
    if culprit.call is None:
        verdict = f"not known, {direction.name}, in {title(culprit.within)}"
    else:
        verdict = f"{title(culprit.call)}, {direction.name}"
    for word, call in (("after", culprit.after), ("before", culprit.before)):
        if call is not None:
            verdict += f", {word} {title(call)}"
    candidates = " or ".join(dict.fromkeys(map(title, culprit.candidates)))
    remarks = (
        *([f"(it may be in {candidates})"] if candidates else []),
        *_hyperparameters(evidence, culprit.call),
    )
    name = None if culprit.call is None else culprit.call.name
    return Location(evidence.reference.dtype, tuple(visits), name, verdict, remarks)


def nothing_departs(evidence: Evidence, *, is_forward: bool) -> Location:
    """The report if all numbers that were compared agree: a dtype may still differ."""
    reference, pairs = evidence.reference, evidence.pairs
    visits = []
    for call in _calls_to_report(evidence):
        (jax_inputs, torch_inputs), (jax_outputs, torch_outputs) = (
            ({*pairs[call][0].dtypes[slot].values()}, reference.dtypes(call, slot))
            for slot in (FORWARD.incoming, FORWARD.outgoing)
        )
        departs = jax_inputs <= torch_inputs and not jax_outputs <= torch_outputs
        remark = (
            f"{', '.join(sorted(jax_outputs))}, not {', '.join(sorted(torch_outputs))}"
            if departs
            else ""
        )
        visits.append(dataclasses.replace(_visit(evidence, call, departs), remark=remark))
        if departs:
            verdict = f"{call.name or 'the module itself'}, by its dtype"
            return Location(reference.dtype, tuple(visits), call.name, verdict)
    if not visits and len(evidence.trace.calls) > 2:
        verdict = "not known, no submodule could be compared with anything"
    elif is_forward:
        verdict = "not known, forward, no submodule is further off than rounding explains"
    else:
        verdict = "none, all that was compared agrees"
    return Location(reference.dtype, tuple(visits), None, verdict)


def _calls_to_report(evidence: Evidence) -> list[Call]:
    """The calls that have counterparts, in the order in which they return."""

    def in_order_of_return(call: Call) -> Iterator[Call]:
        for each in evidence.trace.calls_inside(call, evidence.direction):
            yield from in_order_of_return(each)
        yield call

    *calls, _ = in_order_of_return(evidence.trace.root)
    return [call for call in calls if call in evidence.pairs]


def _visit(evidence: Evidence, call: Call, departs: bool) -> Visit:
    errors, layouts = [], []
    for slot in (evidence.direction.incoming, evidence.direction.outgoing):
        found = evidence.differences.get((call, slot), {}).values()
        errors.append(max((d.error for d in found), default=None))
        layouts += [d.layout for d in found if d.layout]
    jax_name = evidence.pairs[call][0].name
    return Visit(call.name, jax_name, errors[0], errors[1], departs, ", ".join({*layouts}))


def _hyperparameters(evidence: Evidence, culprit: Call | None) -> Iterator[str]:
    """The hyperparameters in which the culprit and its JAX counterpart differ."""
    if culprit is None or culprit not in evidence.pairs:
        return
    counterpart = evidence.pairs[culprit][0]
    if found := ", ".join(
        hyperparameter_differences(culprit.hyperparameters, counterpart.hyperparameters)
    ):
        yield f"{culprit.kind} | {counterpart.kind}: {found}"


def _title(trace: Trace, call: Call) -> str:
    """The name of a call's submodule, with the call's number if the submodule has several calls."""
    if not call.name:
        return "the module itself"
    calls = [each for each in trace.calls if each.name == call.name]
    which = f" in call {calls.index(call) + 1} of {len(calls)}" if len(calls) > 1 else ""
    return call.name + which
