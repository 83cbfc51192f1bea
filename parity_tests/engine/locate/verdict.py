"""What the report says of a comparison call by call."""

import dataclasses
from collections.abc import Iterator

from parity_tests.engine.locate.blame import Blame, timeline
from parity_tests.engine.locate.comparison import Comparison
from parity_tests.engine.locate.evidence import (
    AGREES,
    DEPARTS,
    FORWARD,
    Direction,
    Evidence,
)
from parity_tests.engine.locate.hyperparameters import differing
from parity_tests.engine.locate.location import Location, Visit
from parity_tests.engine.locate.record import Call


def departure(
    comparison: Comparison, direction: Direction, evidence: Evidence, blame: Blame
) -> Location:
    """What it says of the first departure."""
    visits = []
    for call, slot in timeline(comparison.oracle.trace, direction):
        departs = slot == direction.given and evidence.state(call, slot) == DEPARTS
        departs |= evidence.state(call, direction.taken) == DEPARTS
        is_hidden = any(
            evidence.state(outer, direction.given) == AGREES for outer in call.ancestors
        )
        is_compared = call in comparison.pairs and not is_hidden and call.parent
        if slot == direction.given and is_compared:
            visits.append(_visit(comparison, call, direction, departs))
        if call in (blame.before, blame.call) and slot == direction.given:
            break
    if blame.call is None:
        verdict = f"not known, {direction}, in {blame.within.name or 'the module'}"
    else:
        verdict = f"{blame.call.name or 'the module itself'}, {direction}"
    for word, call in (("after", blame.after), ("before", blame.before)):
        if call is not None and call.kind != "run" and call not in blame.within.ancestors:
            verdict += f", {word} {call.name or 'the module'}"
    culprit = None if blame.call is None else blame.call.name
    remarks = (*_remarks(blame.unknown), *_hyperparameters(comparison, blame.call))
    return Location(comparison.theirs.dtype, tuple(visits), culprit, verdict, remarks)


def nothing_departs(comparison: Comparison, is_forward: bool) -> Location:
    """What it says if all numbers agree that could be compared, or those forward.

    Is there another dtype?
    """
    theirs, oracle, pairs = comparison.theirs, comparison.oracle, comparison.pairs
    compared = [
        call
        for call, slot in timeline(oracle.trace, FORWARD)
        if slot == FORWARD.given and call in pairs and call is not oracle.whole
    ]
    visits = []
    for call in compared:
        (taken, right), (given, expected) = (
            (pairs[call][0].dtypes_in(slot), theirs.dtypes(call, slot))
            for slot in (FORWARD.taken, FORWARD.given)
        )
        departs = taken <= right and not given <= expected
        remark = f"{', '.join(sorted(given))}, not {', '.join(sorted(expected))}" if departs else ""
        visit = _visit(comparison, call, FORWARD, departs)
        visits.append(dataclasses.replace(visit, remark=remark))
        if departs:
            verdict = f"{call.name or 'the module itself'}, by its dtype"
            return Location(theirs.dtype, tuple(visits), call.name, verdict)
    if compared or len(oracle.trace.calls) <= 2:
        verdict = "none, all that was compared agrees"
        if is_forward:
            verdict = "not known, forward, no submodule is further off than rounding explains"
    else:
        verdict = "not known, no submodule could be compared with anything"
    return Location(theirs.dtype, tuple(visits), None, verdict)


def _visit(comparison: Comparison, call: Call, direction: Direction, departs: bool) -> Visit:
    errors, layouts = [], []
    for slot in (direction.taken, direction.given):
        found = comparison.differences.get((call, slot), {}).values()
        errors.append(max((d.error for d in found), default=None))
        layouts += [d.layout for d in found if d.layout]
    jax_name = comparison.pairs[call][0].name
    return Visit(call.name, jax_name, errors[0], errors[1], departs, ", ".join({*layouts}))


def _hyperparameters(comparison: Comparison, culprit: Call | None) -> Iterator[str]:
    """Those of the culprit and of its JAX counterpart, where they differ."""
    if culprit is None or culprit not in comparison.pairs:
        return
    ours = comparison.pairs[culprit][0]
    if found := ", ".join(differing(culprit.hyperparameters, ours.hyperparameters)):
        yield f"{culprit.kind} | {ours.kind}: {found}"


def _remarks(unknown: tuple[Call, ...]) -> tuple[str, ...]:
    names = [*dict.fromkeys(call.name for call in unknown if call.name)]
    if not names:
        return ()
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return (f"(not compared: {shown}, which nothing in JAX corresponds to)",)
