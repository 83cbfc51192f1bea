"""Whose code is it that first departs?"""

import dataclasses
from collections.abc import Callable, Iterable

from parity_tests.engine.locate.evidence import (
    AGREES,
    DEPARTS,
    FORWARD,
    UNKNOWN,
    Direction,
    Evidence,
    is_constant,
    is_telling,
    numbers,
)
from parity_tests.engine.locate.record import Call, Trace


@dataclasses.dataclass(frozen=True)
class Blame:
    """The call whose own code first departs, between which others, and what was not compared."""

    call: Call | None
    """None where that cannot be told from what was compared."""
    within: Call
    after: Call | None
    before: Call | None
    unknown: tuple[Call, ...] = ()


def timeline(trace: Trace, direction: Direction) -> list[tuple[Call, str]]:
    """When each call got its first and gave its last array."""
    first: dict[Call, int] = {}
    last: dict[Call, int] = {}
    for when, (call, slot) in enumerate(trace.events):
        if slot == direction.taken:
            first.setdefault(call, when)
        elif slot == direction.given:
            last[call] = when
    for call in trace.calls:
        if call in first or call in last:
            first.setdefault(call, last.get(call, 0))
            last[call] = max(last.get(call, 0), first[call])
    for call in reversed(trace.calls):  # a call ends after those in it, and begins before them
        if call in last and call.parent in last:
            last[call.parent] = max(last[call.parent], last[call])
            first[call.parent] = min(first[call.parent], first[call])
    depth = {call: len([*call.ancestors]) for call in first}
    moments = [(when, 0, depth[call], call, direction.taken) for call, when in first.items()]
    moments += [(when, 1, -depth[call], call, direction.given) for call, when in last.items()]
    return [(call, slot) for *_, call, slot in sorted(moments, key=lambda m: m[:3])]


def find(trace: Trace, direction: Direction, evidence: Evidence) -> Blame | None:
    """The first departure of the run in this direction."""
    innocent = {
        call
        for call in trace.calls
        if evidence.state(call, direction.given) == AGREES and call.slots[direction.given]
    }
    moments, fed = timeline(trace, direction), trace.fed_by()

    def onward(call: Call) -> Iterable[Call]:
        return call.sources if direction is FORWARD else fed.get(call, ())

    for index, (call, slot) in enumerate(moments):
        if call in innocent or any(outer in innocent for outer in call.ancestors):
            continue
        if evidence.state(call, slot) == DEPARTS:
            return _Search(moments, index, direction, evidence, innocent, onward).blame(call, slot)
    return None


def reached(calls: Iterable[Call], onward: Callable[[Call], Iterable[Call]]) -> set[Call]:
    """The calls that some calls lead to, in one or more steps."""
    seen: set[Call] = set()
    left = [*calls]
    while left:
        new = {*onward(left.pop())} - seen
        seen |= new
        left += new
    return seen


class _Search:
    """Looks back from the first moment that departs."""

    def __init__(
        self,
        moments: list[tuple[Call, str]],
        index: int,
        direction: Direction,
        evidence: Evidence,
        innocent: set[Call],
        onward: Callable[[Call], Iterable[Call]],
    ):
        self.moments, self.before = moments, moments[:index]
        self.direction, self.evidence, self.innocent = direction, evidence, innocent
        self.onward = onward
        """What a call needs to give what is right: backward, those that it feeds."""
        self.harmless = {
            numbers(call, direction.taken, label)
            for call in innocent
            for label in call.slots[direction.taken]
        }
        """What calls get that give what is right, whether it was compared or not."""

    def blame(self, call: Call, slot: str) -> Blame:
        frame = call.parent if slot == self.direction.taken and call.parent else call
        departing = {
            numbers(call, slot, label)
            for label, state in self.evidence.of[call, slot].items()
            if state == DEPARTS
        }
        blame = self._in(frame, departing, call)
        return dataclasses.replace(blame, before=call if call is not blame.call else None)

    def _in(self, frame: Call, departing: set[bytes], call: Call) -> Blame:
        """The culprit is a call in the frame that gives what departs, or the frame's own code."""
        giver = self._giver(frame, departing)
        if giver is not None and self.knows_taken(giver):
            return self._in(giver, departing, call)
        while not self.knows_taken(frame) and frame.parent is not None:
            frame = frame.parent
        outer, (frame, is_clear) = frame, self._inside(frame)
        is_clear &= not any(frame in (cut, *cut.ancestors) for cut in self.evidence.cut)
        frame, is_certain = self._or_around(frame)
        is_clear &= is_certain
        unknown = tuple(
            other
            for other, slot in self.before
            if slot == self.direction.given
            and frame in other.ancestors
            and not any(outer in self.innocent for outer in (other, *other.ancestors))
            and self.evidence.state(other, slot) == UNKNOWN
        )
        after = next(
            (
                other
                for other, slot in reversed(self.before)
                if slot == self.direction.given
                and other.parent is frame
                and self.evidence.state(other, slot) == AGREES
            ),
            None,
        )
        is_known = after or frame is not outer or frame in self.evidence.compared
        is_sure = is_known or sum(bool(other.weights) for other in unknown) <= 1
        return Blame(frame if is_sure and is_clear else None, frame, after, None, unknown)

    def _inside(self, frame: Call) -> tuple[Call, bool]:
        """The call in the frame that gets what is right and after which nothing is.

        And whether that is clear: no call gets something right and something unknown. If several
        calls get the same and give nothing right, it is rather what they get: from the frame, or
        from outside of it.
        """
        direction, state = self.direction, self.evidence.state
        left = self._not_shown_right(frame)
        for part in left:
            if not self.knows_taken(part):
                return frame, state(part, direction.taken) != AGREES
            taken = self._numbers(part, direction.taken)
            rivals = [p for p in left if p.weights and p is not part and taken]
            if any(self._numbers(p, direction.taken) == taken for p in rivals):
                return frame, not taken <= self._numbers(frame, direction.taken)
            if any(part in other.ancestors for other, _ in self.moments):
                return self._inside(part)
            if part.weights or part in self.evidence.similar:
                if not any(map(is_telling, part.slots[direction.taken].values())):
                    # nobody knows which integers it gets in JAX; torch's own embedding takes them
                    return frame, part.kind == "Embedding"
                return part, True
        return frame, True

    def _or_around(self, part: Call) -> tuple[Call, bool]:
        """The call, or one around it whose code hands it what it takes, and whether that is clear.

        What a part takes may have come to it wrong from a call through which torch passes it on.
        """
        taken = self._numbers(part, self.direction.taken)
        for outer in part.ancestors if self._gives_all_wrong(part) else ():
            if outer.parent is None:
                break
            if not taken <= self._numbers(outer, self.direction.taken):
                return (part, True) if outer is part.parent else (outer, False)
            if outer in self.evidence.compared:
                return outer, True
        return part, True

    def _gives_all_wrong(self, part: Call) -> bool:
        """Is it without a counterpart, and no gradient right that it gives, or a call in it?"""
        if self.direction is FORWARD or part in self.evidence.compared:
            return False
        taken = self._numbers(part, self.direction.taken)
        states = {
            state
            for (call, slot), found in self.evidence.of.items()
            if slot == self.direction.given and part in (call, *call.ancestors)
            for label, state in found.items()
            if numbers(call, slot, label) not in taken
        }
        return DEPARTS in states and AGREES not in states

    def _not_shown_right(self, frame: Call) -> list[Call]:
        """The calls in the frame that do not give what is right, and which nothing right needs."""
        parts = [
            call
            for call, slot in self.moments
            if slot == self.direction.taken and call.parent is frame
        ]
        right = {p for p in parts if self.evidence.state(p, self.direction.given) == AGREES}
        needed = reached(right, self.onward)
        return [part for part in parts if part not in right | needed]

    @staticmethod
    def _numbers(call: Call, slot: str) -> set[bytes]:
        """What tells the arrays of a slot from all others, but for constants."""
        arrays = call.slots[slot].items()
        return {numbers(call, slot, label) for label, a in arrays if not is_constant(a)}

    def knows_taken(self, call: Call) -> bool:
        """Is all right that the call gets? The whole run gets what the user gave.

        JAX's counterpart may get less than torch's module, and compute the rest.
        """
        taken, slot = call.slots[self.direction.taken], self.direction.taken
        if call.parent is None or not taken:
            return True
        state = self.evidence.state(call, slot)
        states = self.evidence.of[call, slot]
        return state == AGREES and (
            call in self.evidence.compared
            or all(
                states[label] == AGREES or numbers(call, slot, label) in self.harmless
                for label, array in taken.items()
                if is_telling(array)
            )
        )

    def _giver(self, frame: Call, departing: set[bytes]) -> Call | None:
        """The last call in the frame that gives these numbers and was not compared by itself."""
        for other, slot in reversed(self.before):
            if slot != self.direction.given or frame not in other.ancestors:
                continue
            given = {numbers(other, slot, label) for label in other.slots[slot]}
            taken = {
                numbers(other, self.direction.taken, label)
                for label in other.slots[self.direction.taken]
            }
            if given & departing and not given & taken:
                return other if other not in self.innocent else None
        return None
