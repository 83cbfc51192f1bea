"""The one rule: the culprit is the smallest region that takes what is right and gives what is not.

JAX need not compute all that torch computes inside. So if JAX does not have the output of a call,
the call is excused if JAX has the outputs of all the calls that take this output. If JAX has only
some of them, the call and those of the others that depart cannot be told apart.
"""

import dataclasses
import itertools

from parity_tests.engine.locate.evidence import DEPARTS, MATCHED, Evidence, is_weight, numbers
from parity_tests.engine.locate.substitute import Substitution
from parity_tests.engine.traces.trace import FORWARD, Call


@dataclasses.dataclass(frozen=True)
class Culprit:
    """The call whose own code first departs, and the calls before and after what departs."""

    call: Call | None
    """None where the candidates cannot be told apart."""
    within: Call
    after: Call | None = None
    before: Call | None = None
    candidates: tuple[Call, ...] = ()


class Rule:
    """Descends from the whole run to the smallest call whose code departs."""

    def __init__(self, evidence: Evidence, substitution: Substitution):
        self.evidence, self.substitution = evidence, substitution
        self.taken, self.given = evidence.direction.taken, evidence.direction.given
        self.is_forward = evidence.direction is FORWARD
        self.fed: dict[Call, set[Call]] = {}
        for call in evidence.trace.calls:
            for source in call.sources:
                self.fed.setdefault(source, set()).add(call)
        right = [call for call in evidence.trace.calls if evidence.is_right(call)]
        self.needed: set[Call] = set()
        """The calls that give something to a call that is right, maybe through others."""
        left = [*right]
        while left:
            new = self.givers(left.pop()) - self.needed
            self.needed |= new
            left += new
        self.harmless = {each for call in right for each in numbers(call, self.taken)} | {
            each for call in self.needed for each in numbers(call, self.given)
        }
        """The arrays that lead to what is right, whether JAX has them or not."""

    def givers(self, call: Call) -> set[Call]:
        """The calls that give what a call takes."""
        return call.sources if self.is_forward else self.fed.get(call, set())

    def culprit(self, frame: Call) -> Culprit:
        """The culprit in a call; unknown if JAX stops a gradient there, maybe before the call."""
        found = self._descend(frame)
        stopped = [c for c in self.evidence.stopped if found.call in (c, *c.ancestors)]
        return self._unsure(found, *stopped) if stopped else found

    def _descend(self, frame: Call) -> Culprit:
        """The culprit in a call that takes what is right and gives what is not."""
        # Without a suspect, it is the code after the last call that is right.
        children = self.evidence.trace.inside(frame, self.evidence.direction)
        suspects = [call for call in children if self._is_suspect(call)]
        after = next((c for c in reversed(children) if self.evidence.is_right(c)), None)
        if not suspects:
            return Culprit(frame, frame, after)

        # A suspect that takes something wrong got it from the code before.
        first, *others = suspects
        earlier = children[: children.index(first)]
        after = next((c for c in reversed(earlier) if self.evidence.is_right(c)), None)
        here = Culprit(frame, frame, after, first)
        if not self.takes_right(first):
            return here

        # If several take the same, what they take may be wrong, although JAX has it somewhere. If
        # JAX does not have what the suspect takes, the call that gives it may be wrong.
        if not self._is_certain(first):
            taken = numbers(first, self.taken)
            rivals = [c for c in others if c.weights and taken and numbers(c, self.taken) == taken]
            if rivals:
                is_from_here = not taken <= numbers(frame, self.taken)
                return here if is_from_here else self._unsure(here, first, *rivals)
            hidden = taken - self.evidence.matched
            hiders = [c for c in self.givers(first) if numbers(c, self.given) & hidden]
            if hiders:
                return self._unsure(here, first, *hiders)
        states = self.evidence.states
        inner = self.evidence.trace.inside(first, self.evidence.direction)
        has_arrays = any(states[call, self.taken] or states[call, self.given] for call in inner)
        return self._descend(first) if has_arrays else self._leaf(here, first)

    def _leaf(self, here: Culprit, leaf: Call) -> Culprit:
        """The culprit is a call without inner calls, or the code around it that feeds it."""
        alone, states = Culprit(leaf, leaf), self.evidence.states
        if self._is_certain(leaf) or not states[leaf, self.taken]:
            return alone

        # Does JAX apply the layer to something else? Then an enclosing call gave it another input:
        # the outermost of those that hand on what they take, or else the code around them.
        taken, given = numbers(leaf, self.taken), numbers(leaf, self.given)
        handed_on = itertools.takewhile(
            lambda outer: taken <= numbers(outer, self.taken), leaf.ancestors
        )
        around = [outer for outer in handed_on if outer.kind != "run"]
        others = (call for call in self.evidence.trace.calls if call is not leaf)
        users = [call for call in others if given and numbers(call, self.taken) == given]
        found = self.substitution.computes_of_another([leaf, *around, *users])
        if found.get(leaf):
            inner = leaf
            for outer in leaf.ancestors:
                if not found.get(outer):
                    return Culprit(outer, outer, here.after, inner)
                inner = outer
        if leaf in found:
            idle = [user for user in users if found.get(user) is False]
            return self._unsure(here, leaf, *idle) if idle and self.is_forward else alone

        # The layer was not run: it is the culprit unless the code around it may be.
        if leaf.weights and not self.substitution.is_possible:
            return self._unsure(here, leaf)
        if self.is_forward:  # which integers JAX's layer takes is unknown
            return alone if taken else self._unsure(here, leaf)
        states = states[leaf, self.given].values()
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
        states = self.evidence.states[call, self.given]
        if call in self.needed:  # no call takes gradients of weights
            return any(s == DEPARTS for label, s in states.items() if is_weight(label))
        tells = DEPARTS in states.values() or self.evidence.tells(call, self.given)
        return bool(tells) and not self.evidence.is_right(call)

    def _is_certain(self, call: Call) -> bool:
        """True if JAX has a counterpart that takes the same."""
        state = self.evidence.state(call, self.taken)
        return call in self.evidence.compared and state == MATCHED

    def takes_right(self, call: Call) -> bool:
        """True if everything that the call takes is right.

        JAX's counterpart may take less and compute the rest.
        """
        if not self.evidence.states[call, self.taken] or self._is_certain(call):
            return True
        is_other = self.evidence.state(call, self.taken) == DEPARTS
        return not is_other and numbers(call, self.taken) <= self.evidence.matched | self.harmless
