"""Compares the arrays of torch's calls with those of JAX."""

import itertools

import numpy as np

from parity_tests.engine.bounds.tolerance import rms
from parity_tests.engine.locate.counterpart import (
    VALUES_OF,
    Place,
    corresponding_places,
    gradients_of_all_uses,
    is_chain,
    joined,
    repetitions,
)
from parity_tests.engine.locate.pairs import Pairs
from parity_tests.engine.locate.search import Search, WantedArray
from parity_tests.engine.locate.values import Difference, difference, identity, is_telling, layouts
from parity_tests.engine.problem import Arrays
from parity_tests.engine.traces.reference_trace import ReferenceTrace
from parity_tests.engine.traces.trace import BACKWARD, FORWARD, SLOTS, Call, Direction, Trace

MATCHED, DEPARTS, UNKNOWN = "matched", "departs", "unknown"


def wanted_values(trace: Trace) -> dict[bytes, WantedArray]:
    """The arrays of a reference to look for among JAX's, without duplicates."""
    wanted: dict[bytes, WantedArray] = {}
    for slot, call in itertools.product(SLOTS[:4], trace.calls):
        # each use of an output gives it a part of its gradient; only the sum counts
        is_total = slot == BACKWARD.incoming
        for label, array in telling_arrays(call, slot).items():
            key = identity(call, slot, label)
            wanted.setdefault(key, WantedArray(array, is_total)).is_total &= is_total
    return wanted


def telling_arrays(call: Call, slot: str) -> Arrays:
    """The arrays of a slot that JAX cannot have by chance, but only if it computes the same."""
    return {label: array for label, array in call.slots[slot].items() if is_telling(array)}


def is_weight(label: str) -> bool:
    """True if the label of an array that a call gives marks the gradient of a weight."""
    return label.startswith("weight ")


def identities(call: Call, slot: str) -> set[bytes]:
    """The identities of the telling arrays in a slot."""
    return {identity(call, slot, label) for label in telling_arrays(call, slot)}


class Evidence:
    """The states of all arrays of torch's calls in one direction.

    An array is matched if JAX's counterpart of the call has it, or if it occurs anywhere among the
    arrays that JAX computes. It departs if the counterpart has another array in its place.
    Otherwise its state is unknown. Gradients that JAX does not compute, because it stops them
    elsewhere, have no state. `min_bound` is the error up to which arrays always agree.
    """

    def __init__(
        self,
        reference: ReferenceTrace,
        jax_trace: Trace,
        pairs: Pairs,
        wanted: dict[bytes, WantedArray],
        min_bound: float,
        direction: Direction,
    ):
        self.reference, self.jax_trace, self.pairs = reference, jax_trace, pairs
        self.min_bound, self.direction = min_bound, direction
        self.trace = reference.trace
        self.states: dict[tuple[Call, str], dict[str, str]] = {}
        self.differences: dict[tuple[Call, str], dict[str, Difference]] = {}
        self._stopped: set[tuple[str, bytes]] = set()
        """The slot and the identity of each gradient that JAX stops elsewhere."""
        self.takes_another: set[Call] = set()
        """The calls whose counterparts take another array of the same shape besides, which they may
        use instead of the one that agrees."""
        self.longer_counterparts: Pairs = {}
        """The counterparts that compute the output of a layer, and return something else."""
        self.paired_calls = pairs.keys() - {self.trace.root}
        incoming, outgoing = direction.incoming, direction.outgoing
        self._incoming_arrays = {
            each for call in self.trace.calls for each in identities(call, incoming)
        }
        for call in self.trace.calls:
            for slot in (incoming, outgoing):
                self.states[call, slot] = dict.fromkeys(call.slots[slot], UNKNOWN)
                self._compare(call, slot)
        for (call, slot), states in self.states.items():
            for label in [each for each, state in states.items() if state == UNKNOWN]:
                if (slot, identity(call, slot, label)) in self._stopped:
                    del states[label]
        if direction is FORWARD:
            whole = self.trace.root
            self.states[whole, incoming] = dict.fromkeys(whole.slots[incoming], MATCHED)
        else:
            self._compare_weight_gradients()
        self._search(wanted)

    def state(self, call: Call, slot: str) -> str:
        """The state of all arrays of a slot together.

        If a call has no counterpart, the arrays that it gives count as matched if the first one is
        matched, and each one that another call takes or that has a gradient. Fewer matches would
        prove too little: if JAX computes a layer's attention weights somewhere, for example, that
        says nothing about the layer's output. An input gradient that is only a part of a sum need
        not be matched if the gradients of the weights are.
        """
        states = self.states[call, slot]
        if DEPARTS in states.values():
            return DEPARTS
        labels = self.telling_labels(call, slot)
        # The counterpart may return other arrays than torch's module.
        lacks_first = labels and states[labels[0]] == UNKNOWN
        if slot == self.direction.outgoing and (call not in self.paired_calls or lacks_first):
            used_labels = [label for label in labels if self._is_used(call, slot, label)]
            if self.direction is FORWARD or not used_labels:
                used_labels += labels[:1]
            is_matched = all(states[label] == MATCHED for label in used_labels)
            return MATCHED if labels and is_matched else UNKNOWN
        return MATCHED if MATCHED in states.values() else UNKNOWN

    def is_right(self, call: Call) -> bool:
        """True if JAX computes the arrays that the call gives."""
        return self.state(call, self.direction.outgoing) == MATCHED

    def telling_labels(self, call: Call, slot: str) -> list[str]:
        """The labels of the telling arrays of a slot, and of the gradients of weights."""
        labels = telling_arrays(call, slot)
        return [each for each in self.states[call, slot] if each in labels or is_weight(each)]

    def _is_used(self, call: Call, slot: str, label: str) -> bool:
        return (
            is_weight(label)
            or identity(call, slot, label) in self._incoming_arrays
            or (self.direction is FORWARD and label in call.slots[BACKWARD.incoming])
        )

    def gets_no_gradient(self, call: Call) -> bool:
        """True if JAX gives all weights of a call a gradient of zero."""
        gradients = self.jax_trace.results.get("weight gradients", {})
        found = [gradients[key] for key in call.slots["weight gradients"] if key in gradients]
        return bool(found) and not any(gradient.any() for gradient in found)

    def is_within(self, call: Call, slot: str, label: str, error: float) -> bool:
        """True if rounding explains the error of an array."""
        return error <= self.reference.bound(call, slot, label, error, self.min_bound)

    def _compare(self, call: Call, slot: str) -> None:
        """Compares the arrays in a slot of a call with those of its counterpart."""
        calls = self.pairs.get(call, [])
        if len({each.name for each in calls}) > 1:
            self._compare_parts(call, slot)
        if len({each.name for each in calls}) != 1:
            return
        if self.direction is BACKWARD and call is not self.trace.root:
            self._compare_gradients(call, slot, calls)
            return
        expected, actual = call.slots[slot], joined(calls, slot)
        places = self._places(call, slot, calls)
        if slot == FORWARD.incoming:  # JAX's module may use an array that torch's does not take
            used = {place.label for place in places.values()}
            known = {actual[label].tobytes() for label in used}
            shapes = {expected[label].shape for label in places}
            if any(
                is_telling(array) and array.shape in shapes and array.tobytes() not in known
                for label, array in actual.items()
                if label not in used
            ):
                self.takes_another.add(call)
        for label, place in places.items():
            array = place.of(actual)
            if array is not None and not (slot == "inputs" and array.size > expected[label].size):
                self._judge(call, slot, [label], array, expected[label])
            # Otherwise JAX pads before its module, for example, and torch's module pads inside.

    def _places(self, call: Call, slot: str, calls: list[Call]) -> dict[str, Place]:
        """The places of JAX's arrays for torch's labels in a slot of inputs or outputs."""
        expected = call.slots[slot]
        if call is self.trace.root:  # the results have the same names on both sides
            return {label: Place(label) for label in expected}

        def agrees(label: str, actual: np.ndarray) -> bool:
            found, bound = self._difference(call, slot, [label], actual, expected[label])
            return found is not None and found.error <= bound

        return corresponding_places(expected, calls, slot, agrees)

    def returned_by_counterpart(self, call: Call) -> Arrays:
        """What a longer counterpart returns instead of a layer's outputs, in their shapes."""
        calls, expected = self.longer_counterparts[call], call.slots[FORWARD.outgoing]
        actual = joined(calls, FORWARD.outgoing)
        return {
            label: array
            for label, place in self._places(call, FORWARD.outgoing, calls).items()
            if (given := place.of(actual)) is not None
            for _, array in itertools.islice(layouts(given, expected[label].shape), 1)
        }

    def _compare_gradients(self, call: Call, slot: str, calls: list[Call]) -> None:
        """Compares the gradients of the arrays that correspond."""
        # The gradient of an array includes those of its repetitions, if JAX repeats it as well.
        values_slot = VALUES_OF[slot]
        values, jax_values = call.slots[values_slot], joined(calls, values_slot)
        places = self._places(call, values_slot, calls)
        jax_repeated = repetitions(jax_values, [place.label for place in places.values()])
        repeated = {
            label: (target, indices)
            for label, (target, indices) in repetitions(values, places).items()
            if label not in places or places[label].label in {*jax_repeated, places[target].label}
        }
        expected = gradients_of_all_uses(values, call.slots[slot], repeated)
        actual = gradients_of_all_uses(jax_values, joined(calls, slot), jax_repeated)

        # A differentiated array without a gradient has a gradient of zero. If JAX does not
        # differentiate an array, it stops the gradient in the code that computes the array. If
        # several calls pass something to each other through other code, the gradients of their
        # outputs prove nothing.
        if slot == BACKWARD.incoming and len(calls) > 1 and not is_chain(calls):
            return
        for label, place in places.items():
            gradient, found = expected.get(label), place.of(actual)
            labels = [
                each for each in call.slots[slot] if label in (each, repeated.get(each, ("",))[0])
            ]
            if gradient is not None and found is not None:
                self._judge(call, slot, labels, found, gradient)
            elif label in repeated or place.label in jax_repeated or calls[0].kind == "tap":
                continue  # the gradient belongs to another array, or JAX may not use what it taps
            elif gradient is not None and gradient.any():
                if any((values_slot, place.label) in each.differentiated for each in calls):
                    self._judge(call, slot, labels, np.zeros_like(gradient), gradient)
                else:
                    self._stopped |= {(slot, identity(call, slot, each)) for each in labels}
            elif found is not None and found.any() and (values_slot, label) in call.differentiated:
                self._judge(call, slot, [label], found, np.zeros_like(values[label]))

    def _compare_parts(self, call: Call, slot: str) -> None:
        """Looks for a call's features in several JAX modules: a port may split a projection."""
        for label, array in call.slots[slot].items() if slot != BACKWARD.outgoing else ():
            search = Search([WantedArray(array)])
            for part in (part for each in self.pairs[call] for part in each.slots[slot].values()):
                search.see(part)
            search.finish()
            error = search.wanted[0].error
            bound = self.reference.bound(call, slot, label, error, self.min_bound)
            self._set_state(call, slot, [label], Difference(error), bound)

    def _difference(
        self, call: Call, slot: str, labels: list[str], actual: np.ndarray, expected: np.ndarray
    ) -> tuple[Difference | None, float]:
        """How far JAX's array is off, and the error up to which the arrays under `labels` agree."""
        largest = max((rms(each) for each in call.slots[slot].values()), default=0.0)
        largest *= self.direction is BACKWARD and slot in self.direction
        found = difference(actual, expected, self.min_bound, largest)
        if found is None:
            return None, self.min_bound
        bound = max(
            self.reference.bound(call, slot, label, found.error, self.min_bound) for label in labels
        )
        if bound > found.error or found.layout:
            found = difference(actual, expected, bound, largest) or found
        return found, bound

    def _judge(
        self, call: Call, slot: str, labels: list[str], actual: np.ndarray, expected: np.ndarray
    ) -> None:
        """Sets the state of the arrays under these labels."""
        found, bound = self._difference(call, slot, labels, actual, expected)
        if found is not None:
            self._set_state(call, slot, labels, found, bound)

    def _set_state(
        self, call: Call, slot: str, labels: list[str], found: Difference, bound: float
    ) -> None:
        state = MATCHED if found.error <= bound else DEPARTS
        self.differences.setdefault((call, slot), {}).update(dict.fromkeys(labels, found))
        self.states[call, slot] |= dict.fromkeys(labels, state)

    def _compare_weight_gradients(self) -> None:
        """Compares the gradients of weights, which a call gives in addition to those of its inputs.

        In float64, where rounding explains nothing, a gradient that departs also counts as
        departing in all enclosing calls.
        """
        actual = self.jax_trace.results.get("weight gradients", {})
        expected = self.trace.results.get("weight gradients", {})
        largest = max(map(rms, expected.values()), default=0.0)
        slot, outgoing = "weight gradients", BACKWARD.outgoing
        for call in self.trace.calls:
            for key, gradient in call.slots[slot].items():
                if key not in actual:
                    continue
                found = difference(actual[key], gradient, self.min_bound, largest)
                found = found or Difference(np.inf)
                self.differences.setdefault((call, outgoing), {})[key] = found
                is_matched = self.is_within(call, slot, key, found.error)
                is_clear = not is_matched and self.reference.dtype == "float64"
                for outer in (call, *call.ancestors) if is_clear else (call,):
                    self.states[outer, outgoing][f"weight {key}"] = (
                        MATCHED if is_matched else DEPARTS
                    )

    def _search(self, wanted: dict[bytes, WantedArray]) -> None:
        """Matches each array whose state is still unknown if JAX computes it anywhere.

        The output of a layer whose counterpart gives another array is matched in the same way, if
        the layer takes right arrays: JAX's module may include an activation that torch's does not.
        """
        # An array may occur in several places: a match in one of them is a match in all.
        places = [
            (call, slot, label, identity(call, slot, label))
            for call in self.trace.calls
            for slot in (self.direction.incoming, self.direction.outgoing)
            for label in call.slots[slot]
            if label in self.states[call, slot]
        ]
        matched = {each for c, s, label, each in places if self.states[c, s][label] == MATCHED}
        self.matched_arrays = matched
        tested = {*matched}
        for call, slot, label, each in places:
            if each in wanted and each not in tested:
                tested.add(each)
                if self.is_within(call, slot, label, wanted[each].error):
                    matched.add(each)
        for call, slot, label, each in places:
            if self.states[call, slot][label] == UNKNOWN and each in matched:
                self.states[call, slot][label] = MATCHED
        if self.direction is BACKWARD:
            return
        for call in self.paired_calls - {call.parent for call in self.trace.calls}:
            is_layer = call.weights and len(self.pairs[call]) == 1
            if is_layer and self.state(call, FORWARD.incoming) == MATCHED:
                states = self.states[call, FORWARD.outgoing]
                for label, state in states.items():
                    if state == DEPARTS and identity(call, FORWARD.outgoing, label) in matched:
                        states[label] = MATCHED
                        if calls := self.pairs.pop(call, None):
                            self.longer_counterparts[call] = calls
