"""The rule that finds the culprit: the smallest call that takes right arrays and gives wrong ones.

In the forward pass, a call of a module takes inputs and gives outputs. In the backward pass, it
takes the gradients of its outputs and gives those of its inputs and weights. An array of torch's is
right if JAX computes it, too; `evidence.py` says how that is decided.

JAX need not compute every array that torch computes. So a call whose output JAX does not have is
still not the culprit if JAX has the outputs of all calls that take this output. If JAX has the
outputs of only some of these calls, the culprit is either the call itself or one of the others, and
nothing tells which.
"""

import dataclasses
import itertools

from parity_tests.engine.locate.evidence import DEPARTS, MATCHED, Evidence, is_weight, numbers
from parity_tests.engine.locate.substitute import Substitution
from parity_tests.engine.traces.trace import FORWARD, Call


@dataclasses.dataclass(frozen=True)
class Culprit:
    """The call whose own code is the first to depart, and the place of the fault in that code."""

    call: Call | None
    """None if there are several candidates that cannot be told apart."""
    within: Call
    """The call itself; if there are several candidates, the call in which the search ended."""
    after: Call | None = None
    """The last right call before the fault."""
    before: Call | None = None
    """The first call after the fault."""
    candidates: tuple[Call, ...] = ()
    """The calls that may be the culprit, if it is unknown which one is."""


class Rule:
    """Descends from a call to the smallest call inside it whose own code departs."""

    def __init__(self, evidence: Evidence, substitution: Substitution):
        self.evidence, self.substitution = evidence, substitution
        self.taken, self.given = evidence.direction.taken, evidence.direction.given
        self.is_forward = evidence.direction is FORWARD
        self.fed: dict[Call, set[Call]] = {}
        """For each call, the calls that take its outputs."""
        for call in evidence.trace.calls:
            for source in call.sources:
                self.fed.setdefault(source, set()).add(call)
        right = [call for call in evidence.trace.calls if evidence.is_right(call)]
        self.needed: set[Call] = set()
        """The calls on which a right call depends, directly or through other calls."""
        left = [*right]
        while left:
            new = self.givers(left.pop()) - self.needed
            self.needed |= new
            left += new
        self.harmless = {each for call in right for each in numbers(call, self.taken)} | {
            each for call in self.needed for each in numbers(call, self.given)
        }
        """The arrays on which right arrays depend, whether JAX has them or not."""

    def givers(self, call: Call) -> set[Call]:
        """The calls that give the arrays that a call takes."""
        return call.sources if self.is_forward else self.fed.get(call, set())

    def culprit(self, frame: Call) -> Culprit:
        """The culprit inside a call.

        There are several candidates if JAX stops a gradient in the call that is found, or maybe
        before it.
        """
        found = self._descend(frame)
        stopped = [c for c in self.evidence.stopped if found.call in (c, *c.ancestors)]
        return self._unsure(found, *stopped) if stopped else found

    def _descend(self, frame: Call) -> Culprit:
        """The culprit inside a call that takes right arrays and gives wrong ones."""
        # If no inner call is a suspect, the fault is in the call's own code, after its last inner
        # call that is right.
        children = self.evidence.trace.inside(frame, self.evidence.direction)
        suspects = [call for call in children if self._is_suspect(call)]
        after = next((c for c in reversed(children) if self.evidence.is_right(c)), None)
        if not suspects:
            return Culprit(frame, frame, after)

        # If the first suspect takes a wrong array, the fault is in the code before the suspect.
        first, *others = suspects
        earlier = children[: children.index(first)]
        after = next((c for c in reversed(earlier) if self.evidence.is_right(c)), None)
        here = Culprit(frame, frame, after, first)
        if not self.takes_right(first):
            return here

        # A suspect without a counterpart that takes the same arrays leaves two doubts. If several
        # suspects take the same arrays, these arrays may be wrong although JAX has them somewhere.
        # If JAX does not have the arrays, the call that gives them may be wrong.
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

        # The suspect is the culprit: look inside it, if anything is known about its inner calls.
        states = self.evidence.states
        inner = self.evidence.trace.inside(first, self.evidence.direction)
        has_arrays = any(states[call, self.taken] or states[call, self.given] for call in inner)
        return self._descend(first) if has_arrays else self._leaf(here, first)

    def _leaf(self, here: Culprit, leaf: Call) -> Culprit:
        """The culprit, which is a call without inner calls or the code that computes its input."""
        alone, states = Culprit(leaf, leaf), self.evidence.states
        if self._is_certain(leaf) or not states[leaf, self.taken]:
            return alone

        # Does JAX apply the layer to another input than torch does? Then the layer is right, and
        # the code of an enclosing call computes that input: the culprit is the innermost enclosing
        # call that JAX does not itself apply to another input.
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

        # JAX does not. If the layer is the culprit, JAX applies the calls that use its output to
        # another array. If JAX does not do so for one of these calls, it is a candidate, too.
        if leaf in found:
            idle = [user for user in users if found.get(user) is False]
            return self._unsure(here, leaf, *idle) if idle and self.is_forward else alone

        # The layer could not be tested. It is the culprit unless the code around it may be.
        if leaf.weights and not self.substitution.is_possible:
            return self._unsure(here, leaf)
        if self.is_forward:  # if the layer takes only integers, those that JAX's takes are unknown
            return alone if taken else self._unsure(here, leaf)
        states = states[leaf, self.given].values()
        if MATCHED in states:  # it takes right arrays; JAX may stop the other gradients before it
            return alone if DEPARTS in states else self._unsure(here, leaf)
        compared = [outer for outer in around if outer in self.evidence.compared]
        if compared:
            return Culprit(compared[0], compared[0], before=leaf)
        return self._unsure(here, leaf) if around else alone

    def _unsure(self, culprit: Culprit, *others: Call) -> Culprit:
        return dataclasses.replace(culprit, call=None, candidates=(*others, culprit.within))

    def _is_suspect(self, call: Call) -> bool:
        """True if the call gives an array that JAX does not have and that no right call needs."""
        states = self.evidence.states[call, self.given]
        if call in self.needed:  # weight gradients may be wrong all the same: no call takes them
            return any(s == DEPARTS for label, s in states.items() if is_weight(label))
        tells = DEPARTS in states.values() or self.evidence.tells(call, self.given)
        return bool(tells) and not self.evidence.is_right(call)

    def _is_certain(self, call: Call) -> bool:
        """True if JAX has a counterpart of the call that takes the same arrays."""
        state = self.evidence.state(call, self.taken)
        return call in self.evidence.compared and state == MATCHED

    def takes_right(self, call: Call) -> bool:
        """True if all arrays that the call takes are right.

        JAX's counterpart may take fewer arrays and compute the others itself.
        """
        if not self.evidence.states[call, self.taken] or self._is_certain(call):
            return True
        is_other = self.evidence.state(call, self.taken) == DEPARTS
        return not is_other and numbers(call, self.taken) <= self.evidence.matched | self.harmless
