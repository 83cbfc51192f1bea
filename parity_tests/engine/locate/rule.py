"""The one rule: the culprit is the smallest region that takes what is right and gives what is not.

JAX need not compute all that torch computes inside. So if JAX does not have the output of a call,
the call is excused if another call needs this output, and JAX has the output of that other call.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable

from parity_tests.engine.locate.evidence import DEPARTS, FORWARD, MATCHED, Evidence
from parity_tests.engine.locate.record import Call
from parity_tests.engine.locate.substitute import Substitution
from parity_tests.engine.locate.values import identity, is_telling


@dataclasses.dataclass(frozen=True)
class Culprit:
    """The call whose own code first departs, and the calls before and after what departs."""

    call: Call | None
    """None where the candidates cannot be told apart."""
    within: Call
    after: Call | None = None
    before: Call | None = None
    candidates: tuple[Call, ...] = ()


def timeline(evidence: Evidence) -> tuple[dict[Call, int], dict[Call, int]]:
    """When each call took its first array, and when it gave its last."""
    direction = evidence.direction
    begins: dict[Call, int] = {}
    ends: dict[Call, int] = {}
    for when, (call, slot) in enumerate(evidence.trace.events):
        if slot in (direction.taken, direction.given):
            begins.setdefault(call, when)
            ends[call] = when
    for call in reversed(evidence.trace.calls):  # a call ends after those in it
        if call in ends and call.parent is not None:
            begins[call.parent] = min(begins.get(call.parent, begins[call]), begins[call])
            ends[call.parent] = max(ends.get(call.parent, ends[call]), ends[call])
    return begins, ends


def reached(calls: Iterable[Call], onward: Callable[[Call], Iterable[Call]]) -> set[Call]:
    """The calls that some calls lead to, in one or more steps."""
    seen: set[Call] = set()
    left = [*calls]
    while left:
        new = {*onward(left.pop())} - seen
        seen |= new
        left += new
    return seen


class Rule:
    """Descends from the whole run to the smallest call whose code departs."""

    def __init__(self, evidence: Evidence, substitution: Substitution):
        self.evidence, self.direction = evidence, evidence.direction
        self.substitution = substitution
        trace = evidence.trace
        self.begins, _ = timeline(evidence)
        self.children: dict[Call, list[Call]] = {}
        for call in sorted(self.begins, key=self.begins.__getitem__):
            if call.parent is not None:
                self.children.setdefault(call.parent, []).append(call)
        fed = trace.fed_by()
        right = [call for call in trace.calls if evidence.is_right(call)]

        def needed_by(call: Call) -> Iterable[Call]:
            return call.sources if self.direction is FORWARD else fed.get(call, ())

        self.excused = reached(right, needed_by)
        self.harmless = {
            each for call in right for each in evidence.numbers(call, self.direction.taken)
        } | {each for call in self.excused for each in evidence.numbers(call, self.direction.given)}
        """The arrays that lead to what is right, whether JAX has them or not."""

    def culprit(self, frame: Call) -> Culprit:
        """The culprit in a call; unknown if JAX stops a gradient there, maybe before the call."""
        found = self._descend(frame)
        stopped = [c for c in self.evidence.stopped if found.call in (c, *c.ancestors)]
        return self._unsure(found, *stopped) if stopped else found

    def _descend(self, frame: Call) -> Culprit:
        """The culprit in a call that takes what is right and gives what is not."""
        evidence, children = self.evidence, self.children.get(frame, [])
        suspects = [c for c in children if self._is_suspect(c)]
        after = next((c for c in reversed(children) if evidence.is_right(c)), None)
        if not suspects:
            return Culprit(frame, frame, after)
        first, *others = suspects
        earlier = [c for c in children if self.begins[c] < self.begins[first]]
        after = next((c for c in reversed(earlier) if evidence.is_right(c)), None)
        here = Culprit(frame, frame, after, first)
        if not self.takes_right(first):
            return here
        if not self._is_certain(first):
            taken = self.numbers(first)
            rivals = [c for c in others if c.weights and taken and self.numbers(c) == taken]
            if rivals:
                is_from_here = not taken <= self.numbers(frame)
                return here if is_from_here else self._unsure(here, first, *rivals)
        if first in self.children:
            return self._descend(first)
        return self._leaf(here, first)

    def _leaf(self, here: Culprit, leaf: Call) -> Culprit:
        """The culprit is a call without inner calls, or the code around it that feeds it."""
        alone = Culprit(leaf, leaf)
        if self._is_certain(leaf) or not self.evidence.states[leaf, self.direction.taken]:
            return alone
        taken, given = self.numbers(leaf), self.evidence.numbers(leaf, self.direction.given)
        handed_on = itertools.takewhile(lambda outer: taken <= self.numbers(outer), leaf.ancestors)
        around = [outer for outer in handed_on if outer.kind != "run"]
        users = [c for c in self.begins if given and self.numbers(c) == given and c is not leaf]
        found = self.substitution.computes_of_another([leaf, *around, *users])
        if found.get(leaf):
            inner = leaf
            for outer in leaf.ancestors:
                if not found.get(outer):
                    return Culprit(outer, outer, here.after, inner)
                inner = outer
        if leaf in found:
            idle = [user for user in users if found.get(user) is False]
            return self._unsure(here, leaf, *idle) if idle and self.direction is FORWARD else alone
        if self.direction is FORWARD:  # which integers JAX's layer takes is unknown
            return alone if taken else self._unsure(here, leaf)
        states = self.evidence.states[leaf, self.direction.given].values()
        if MATCHED in states:  # it takes what is right; JAX may stop the rest before it
            return alone if DEPARTS in states else self._unsure(here, leaf)
        compared = [outer for outer in around if outer in self.evidence.compared]
        if compared:
            return Culprit(compared[0], compared[0], before=leaf)
        return self._unsure(here, leaf) if around else alone

    def _unsure(self, culprit: Culprit, *others: Call) -> Culprit:
        return dataclasses.replace(culprit, call=None, candidates=(*others, culprit.within))

    def _is_suspect(self, call: Call) -> bool:
        """True if it gives something that JAX does not have and that nothing right needs."""
        states = self.evidence.states[call, self.direction.given]
        if call in self.excused:  # no call takes gradients of weights
            return any(s == DEPARTS for label, s in states.items() if label[:7] == "weight ")
        return not self.evidence.is_right(call) and (
            DEPARTS in states.values()
            or any(self.evidence.is_telling(call, self.direction.given, each) for each in states)
        )

    def _is_certain(self, call: Call) -> bool:
        """True if JAX has a counterpart that takes the same."""
        state = self.evidence.state(call, self.direction.taken)
        return call in self.evidence.compared and state == MATCHED

    def takes_right(self, call: Call) -> bool:
        """True if everything that the call takes is right.

        JAX's counterpart may take less and compute the rest.
        """
        taken = self.direction.taken
        states = self.evidence.states[call, taken]
        if not states or self._is_certain(call):
            return True
        return self.evidence.state(call, taken) != DEPARTS and all(
            state == MATCHED or identity(call, taken, label) in self.harmless
            for label, state in states.items()
            if is_telling(call.slots[taken][label])
        )

    def numbers(self, call: Call) -> set[bytes]:
        """The identities of what the call takes."""
        return self.evidence.numbers(call, self.direction.taken)
