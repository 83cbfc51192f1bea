"""Which arrays of torch's calls JAX computes, and which it computes differently."""

import dataclasses

import numpy as np

from parity_tests.engine.bounds.tolerance import rms
from parity_tests.engine.locate.match import Pairs, assigned, stacked
from parity_tests.engine.locate.record import Call, Trace
from parity_tests.engine.locate.reference_trace import ReferenceTrace
from parity_tests.engine.locate.run import Run
from parity_tests.engine.locate.search import Search, Wanted
from parity_tests.engine.locate.values import Difference, difference, identity, is_telling

MATCHED, DEPARTS, UNKNOWN = "matched", "departs", "unknown"


@dataclasses.dataclass(frozen=True)
class Direction:
    """Forward, a call takes inputs and gives outputs; backward, it takes and gives gradients."""

    name: str
    taken: str
    given: str

    def __str__(self) -> str:
        """The name of the direction, for sentences."""
        return self.name


FORWARD = Direction("forward", "inputs", "outputs")
BACKWARD = Direction("backward", "output gradients", "input gradients")


def wanted_values(trace: Trace) -> dict[bytes, Wanted]:
    """The arrays of a reference that are looked for among JAX's, each once."""
    wanted: dict[bytes, Wanted] = {}
    for direction in (FORWARD, BACKWARD):
        for slot in (direction.taken, direction.given):
            for call in trace.calls:
                for label, array in call.slots[slot].items():
                    if is_telling(array):
                        is_total = slot == BACKWARD.taken
                        each = wanted.setdefault(
                            identity(call, slot, label), Wanted(array, is_total)
                        )
                        each.is_total &= is_total
    return wanted


class Evidence:
    """The states of all arrays of torch's calls in one direction.

    An array is matched if JAX's counterpart of the call has it, or if it occurs anywhere among what
    JAX computes. It departs if the counterpart has another array in its place.
    """

    def __init__(
        self,
        reference: ReferenceTrace,
        jax_run: Run,
        pairs: Pairs,
        wanted: dict[bytes, Wanted],
        least: float,
        direction: Direction,
    ):
        self.reference, self.jax_run, self.pairs = reference, jax_run, pairs
        self.least, self.direction = least, direction
        self.trace = reference.run.trace
        self.states: dict[tuple[Call, str], dict[str, str]] = {}
        self.differences: dict[tuple[Call, str], dict[str, Difference]] = {}
        self.stopped: set[Call] = set()
        """The calls in which, or before which, JAX stops a gradient."""
        self.compared = pairs.keys() - {reference.run.whole}
        self.parents = {call.parent for call in self.trace.calls}
        self._taken = {
            each for call in self.trace.calls for each in self.numbers(call, direction.taken)
        }
        self._compare_counterparts()
        self._search(wanted)

    def numbers(self, call: Call, slot: str) -> set[bytes]:
        """The identities of the telling arrays in a slot."""
        arrays = call.slots[slot].items()
        return {identity(call, slot, label) for label, array in arrays if is_telling(array)}

    def state(self, call: Call, slot: str) -> str:
        """The state of all arrays of a slot.

        If a call has no counterpart, not every array that it gives must be matched: only the first
        one, and those that another call takes or that have a gradient. If JAX computes a layer's
        attention weights somewhere, for example, that says nothing about the layer's output. An
        input gradient that is only a part of a sum need not be matched if the gradients of the
        weights are.
        """
        states = self.states[call, slot]
        if DEPARTS in states.values():
            return DEPARTS
        telling = [label for label in states if self.is_telling(call, slot, label)]
        lacks_first = telling and states[telling[0]] == UNKNOWN  # its counterpart has other results
        if slot == self.direction.given and (call not in self.compared or lacks_first):
            used = [label for label in telling if self._is_used(call, slot, label)]
            if self.direction is FORWARD or not used:
                used += telling[:1]
            is_matched = all(states[label] == MATCHED for label in used)
            return MATCHED if telling and is_matched else UNKNOWN
        return MATCHED if MATCHED in states.values() else UNKNOWN

    def is_right(self, call: Call) -> bool:
        """True if JAX computes what the call gives."""
        return self.state(call, self.direction.given) == MATCHED

    def is_telling(self, call: Call, slot: str, label: str) -> bool:
        """True if JAX can only have the array by computing the same."""
        return label.startswith("weight ") or is_telling(call.slots[slot][label])

    def _is_used(self, call: Call, slot: str, label: str) -> bool:
        return (
            label.startswith("weight ")
            or identity(call, slot, label) in self._taken
            or (self.direction is FORWARD and label in call.slots[BACKWARD.taken])
        )

    def _compare_counterparts(self) -> None:
        taken, given = self.direction.taken, self.direction.given
        for call in self.trace.calls:
            for slot in (taken, given):
                self.states[call, slot] = dict.fromkeys(call.slots[slot], UNKNOWN)
                if call in self.pairs:
                    self._compare(call, slot)
            if self.direction is BACKWARD and call in self.pairs:
                self._note_stopped(call)
        if self.direction is FORWARD:
            whole = self.reference.run.whole
            self.states[whole, taken] = dict.fromkeys(whole.slots[taken], MATCHED)
        else:
            self._compare_weight_gradients()

    def _compare(self, call: Call, slot: str) -> None:
        calls, expected = self.pairs[call], call.slots[slot]
        if len({each.name for each in calls}) > 1:
            self._compare_parts(call, slot)
            return
        largest = max((rms(each) for each in expected.values()), default=0.0)
        largest *= self.direction is BACKWARD
        for label, actual in assigned(expected, stacked(calls, slot)):
            d = difference(actual, expected[label], self.least, largest)
            if d is None or (slot == "inputs" and actual.size > expected[label].size):
                continue  # JAX pads before its module, for example, and torch's module pads inside
            bound = self.reference.bound(call, slot, label, d.error, self.least)
            if bound > d.error or d.layout:
                d = difference(actual, expected[label], bound, largest) or d
            self._judge(call, slot, label, d, bound)

    def _compare_parts(self, call: Call, slot: str) -> None:
        """Look for the features in several modules, into which a port splits a joint projection."""
        for label, array in call.slots[slot].items() if slot != BACKWARD.given else ():
            search = Search([Wanted(array)])
            for each in self.pairs[call]:
                for part in each.slots[slot].values():
                    search.see(part)
            search.finish()
            error = search.wanted[0].error
            bound = self.reference.bound(call, slot, label, error, self.least)
            self._judge(call, slot, label, Difference(error), bound)

    def _judge(self, call: Call, slot: str, label: str, found: Difference, bound: float) -> None:
        self.differences.setdefault((call, slot), {})[label] = found
        self.states[call, slot][label] = MATCHED if found.error <= bound else DEPARTS

    def _note_stopped(self, call: Call) -> None:
        """Note if JAX stops a gradient that torch does not: after a module, in it or before it."""
        counterpart = self.pairs[call][0].slots
        is_tap = not counterpart["inputs"]
        if is_tap or not call.slots[BACKWARD.given] or counterpart[BACKWARD.given]:
            return
        if counterpart[BACKWARD.taken] or "weight gradients" not in self.jax_run.results:
            self.stopped.add(call)
        else:
            self.states[call, BACKWARD.taken] = dict.fromkeys(call.slots[BACKWARD.taken], DEPARTS)

    def _compare_weight_gradients(self) -> None:
        """Compare the gradients of weights, which a call gives beside those of its inputs.

        In float64, where rounding explains nothing, a gradient that departs counts as departing in
        all enclosing calls, too.
        """
        actual = self.jax_run.results.get("weight gradients", {})
        expected = self.reference.run.results.get("weight gradients", {})
        largest = max(map(rms, expected.values()), default=0.0)
        slot, given = "weight gradients", BACKWARD.given
        for call in self.trace.calls:
            for key, wanted in call.slots[slot].items():
                if key not in actual:
                    continue
                d = difference(actual[key], wanted, self.least, largest)
                error = np.inf if d is None else d.error
                bound = self.reference.bound(call, slot, key, error, self.least)
                self.differences.setdefault((call, given), {})[key] = Difference(error)
                state = MATCHED if error <= bound else DEPARTS
                is_clear = state == DEPARTS and self.reference.dtype == "float64"
                for giver in (call, *call.ancestors) if is_clear else (call,):
                    self.states[giver, given][f"weight {key}"] = state

    def _search(self, wanted: dict[bytes, Wanted]) -> None:
        """Match every array that is still unknown if JAX computes it anywhere.

        The same holds for the output of a layer whose counterpart gives something else, if the
        layer takes what is right: JAX's module may include an activation that torch's does not.
        """
        places = [
            (call, slot, label, identity(call, slot, label))
            for call in self.trace.calls
            for slot in (self.direction.taken, self.direction.given)
            for label in call.slots[slot]
        ]
        matched = {each for c, s, label, each in places if self.states[c, s][label] == MATCHED}
        tried = {*matched}
        for call, slot, label, each in places:
            if each in wanted and each not in tried:
                error = wanted[each].error
                if error <= self.reference.bound(call, slot, label, error, self.least):
                    matched.add(each)
                tried.add(each)
        for call, slot, label, each in places:
            if self.states[call, slot][label] == UNKNOWN and each in matched:
                self.states[call, slot][label] = MATCHED
        if self.direction is FORWARD:
            self._set_straight(matched)

    def _set_straight(self, matched: set[bytes]) -> None:
        """Match the outputs of layers whose counterparts compute more than the layers do."""
        for call in [*self.compared]:
            if not call.weights or call in self.parents or len(self.pairs[call]) > 1:
                continue
            if self.state(call, FORWARD.taken) != MATCHED:
                continue
            states = self.states[call, FORWARD.given]
            for label in states:
                each = identity(call, FORWARD.given, label)
                if states[label] == DEPARTS and each in matched:
                    states[label] = MATCHED
                    self.pairs.pop(call, None)
