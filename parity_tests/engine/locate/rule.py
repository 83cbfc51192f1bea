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

from parity_tests.engine.locate.evidence import DEPARTS, MATCHED, Evidence, identities, is_weight
from parity_tests.engine.locate.substitute import departs_alone, takes_other_input
from parity_tests.engine.problem import Problem
from parity_tests.engine.traces.trace import FORWARD, Call


@dataclasses.dataclass(frozen=True)
class Culprit:
    """The call whose own code is the first to depart, and the place of the fault in that code."""

    call: Call
    """If there are several candidates, the call in which the search ended."""
    after: Call | None = None
    """The last right call before the fault."""
    before: Call | None = None
    """The first call after the fault."""
    candidates: tuple[Call, ...] = ()
    """The calls that may be the culprit, if they cannot be told apart."""


class Rule:
    """Descends from a call to the smallest call inside it whose own code departs."""

    def __init__(self, problem: Problem, evidence: Evidence):
        self.problem, self.evidence = problem, evidence
        self.incoming, self.outgoing = evidence.direction.incoming, evidence.direction.outgoing
        self.is_forward = evidence.direction is FORWARD
        self.consumers: dict[Call, set[Call]] = {}
        """For each call, the calls that take its outputs."""
        for call in evidence.trace.calls:
            for source in call.sources:
                self.consumers.setdefault(source, set()).add(call)
        right_calls = [call for call in evidence.trace.calls if evidence.is_right(call)]
        self.needed_calls: set[Call] = set()
        """The calls on which a right call depends, directly or through other calls."""
        remaining = [*right_calls]
        while remaining:
            new = self.producers(remaining.pop()) - self.needed_calls
            self.needed_calls |= new
            remaining += new
        self.needed_arrays = set[bytes]().union(
            *(identities(call, self.incoming) for call in right_calls),
            *(identities(call, self.outgoing) for call in self.needed_calls),
        )
        """The arrays on which right arrays depend, whether JAX has them or not."""

    def producers(self, call: Call) -> set[Call]:
        """The calls that give the arrays that a call takes."""
        return call.sources if self.is_forward else self.consumers.get(call, set())

    def culprit(self, frame: Call) -> Culprit:
        """The culprit inside a call that takes right arrays and gives wrong ones."""
        # If no inner call is a suspect, the fault is in the call's own code, after its last inner
        # call that is right.
        children = self.evidence.trace.calls_inside(frame, self.evidence.direction)
        suspects = [call for call in children if self._is_suspect(call)]
        after = next((c for c in reversed(children) if self.evidence.is_right(c)), None)
        if not suspects:
            return self._own_code(Culprit(frame, after))

        # If the first suspect takes a wrong array, the fault is in the code before the suspect.
        first, *others = suspects
        earlier = children[: children.index(first)]
        after = next((c for c in reversed(earlier) if self.evidence.is_right(c)), None)
        before_first = Culprit(frame, after, first)
        if not self.has_right_inputs(first):
            return self._own_code(before_first)

        # A suspect without a counterpart that takes the same arrays leaves two doubts. If several
        # suspects take the same arrays, these arrays may be wrong although JAX has them somewhere.
        # If JAX does not have the arrays, the call that gives them may be wrong.
        if not self._has_matching_counterpart(first):
            incoming = identities(first, self.incoming)
            suspects_with_same_input = [
                c
                for c in others
                if c.weights and incoming and identities(c, self.incoming) == incoming
            ]
            if suspects_with_same_input:
                if not incoming <= identities(frame, self.incoming):  # made in this frame
                    return before_first
                return self._ambiguous(before_first, first, *suspects_with_same_input)
            unmatched = incoming - self.evidence.matched_arrays
            producers_of_unmatched = [
                c for c in self.producers(first) if identities(c, self.outgoing) & unmatched
            ]
            if producers_of_unmatched:
                return self._ambiguous(before_first, first, *producers_of_unmatched)

        # The suspect is the culprit: look inside it, if anything is known about its inner calls.
        states = self.evidence.states
        inner = self.evidence.trace.calls_inside(first, self.evidence.direction)
        if any(states[call, slot] for call in inner for slot in (self.incoming, self.outgoing)):
            return self.culprit(first)
        return self._leaf_culprit(before_first, first)

    def _own_code(self, culprit: Culprit) -> Culprit:
        """The culprit, which is the own code of a call, or a layer whose result this code takes."""
        inner = self.evidence.trace.calls_inside(culprit.call, self.evidence.direction)
        undecided = []
        for layer in (call for call in inner if call in self.evidence.longer_counterparts):
            is_wrong = departs_alone(self.problem, self.evidence, layer)
            if is_wrong:
                self.evidence.pairs[layer] = self.evidence.longer_counterparts[layer]
                return Culprit(layer)
            if is_wrong is None:
                undecided.append(layer)
        return self._ambiguous(culprit, *undecided) if undecided else culprit

    def _leaf_culprit(self, in_frame: Culprit, leaf: Call) -> Culprit:
        """The culprit, which is a call without inner calls or the code that computes its input."""
        leaf_itself, states = Culprit(leaf), self.evidence.states
        if self._has_matching_counterpart(leaf) or not states[leaf, self.incoming]:
            return leaf_itself

        # Does JAX apply the layer to another input than torch does? Then the layer is right, and
        # the code of an enclosing call computes that input: the culprit is the innermost enclosing
        # call that JAX does not itself apply to another input.
        incoming, outgoing = identities(leaf, self.incoming), identities(leaf, self.outgoing)
        callers_with_same_input = itertools.takewhile(
            lambda outer: incoming <= identities(outer, self.incoming), leaf.ancestors
        )
        callers = [outer for outer in callers_with_same_input if outer.kind != "run"]
        other_calls = (call for call in self.evidence.trace.calls if call is not leaf)
        users = [
            call for call in other_calls if outgoing and identities(call, self.incoming) == outgoing
        ]
        tested = takes_other_input(self.problem, self.evidence, leaf, [*callers, *users])
        if tested.get(leaf):
            inner = leaf
            for outer in leaf.ancestors:
                if not tested.get(outer):
                    return Culprit(outer, in_frame.after, inner)
                inner = outer

        # JAX does not. If the layer is the culprit, JAX applies the calls that use its output to
        # another array. If JAX does not do so for one of these calls, it is a candidate, too. If
        # JAX only stops gradients, nothing tells whether it does so in the layer or around it.
        gives = states[leaf, self.outgoing].values()
        are_right_or_missing = MATCHED in gives and DEPARTS not in gives
        if leaf in tested:
            unaffected_users = [user for user in users if tested.get(user) is False]
            if unaffected_users and self.is_forward:
                return self._ambiguous(in_frame, leaf, *unaffected_users)
            is_stopped = are_right_or_missing or self.evidence.gets_no_gradient(leaf)
            is_clear = self.is_forward or not is_stopped
            return leaf_itself if is_clear else self._ambiguous(in_frame, leaf)

        # The layer could not be tested. It is the culprit unless the code around it may be.
        if leaf.weights and self.evidence.reference.run_again is None:
            return self._ambiguous(in_frame, leaf)
        if self.is_forward:  # if the layer takes only integers, those that JAX's takes are unknown
            return leaf_itself if incoming else self._ambiguous(in_frame, leaf)
        if MATCHED in gives:
            return self._ambiguous(in_frame, leaf) if are_right_or_missing else leaf_itself
        paired_callers = [outer for outer in callers if outer in self.evidence.paired_calls]
        if paired_callers:
            return Culprit(paired_callers[0], before=leaf)
        return self._ambiguous(in_frame, leaf) if callers else leaf_itself

    def _ambiguous(self, culprit: Culprit, *others: Call) -> Culprit:
        return dataclasses.replace(culprit, candidates=(*others, culprit.call))

    def _is_suspect(self, call: Call) -> bool:
        """True if the call gives an array that JAX does not have and that no right call needs."""
        states = self.evidence.states[call, self.outgoing]
        if call in self.needed_calls:
            # The gradients of its weights may be wrong all the same, because no call takes them.
            return any(s == DEPARTS for label, s in states.items() if is_weight(label))
        tells = DEPARTS in states.values() or self.evidence.telling_labels(call, self.outgoing)
        return bool(tells) and not self.evidence.is_right(call)

    def _has_matching_counterpart(self, call: Call) -> bool:
        """True if JAX has a counterpart of the call that takes the same arrays, and no others."""
        state = self.evidence.state(call, self.incoming)
        is_clear = call in self.evidence.paired_calls - self.evidence.takes_another
        return is_clear and state == MATCHED

    def has_right_inputs(self, call: Call) -> bool:
        """True if all arrays that the call takes are right.

        JAX's counterpart may take fewer arrays and compute the others itself.
        """
        if not self.evidence.states[call, self.incoming] or self._has_matching_counterpart(call):
            return True
        if self.evidence.state(call, self.incoming) == DEPARTS:
            return False
        return identities(call, self.incoming) <= self.evidence.matched_arrays | self.needed_arrays
