"""What is known of the arrays of torch's calls, forward and backward."""

import dataclasses
import hashlib

import numpy as np

from parity_tests.engine.locate.agree import mask_of
from parity_tests.engine.locate.record import Call, Trace

AGREES, DEPARTS, UNKNOWN = "agrees", "departs", "unknown"
ROUND = 2.0**-20
"""Its multiples are numbers that two computations may have in common by chance."""


@dataclasses.dataclass(frozen=True)
class Direction:
    """Forward, a call gets inputs and gives outputs; backward, gradients the other way."""

    name: str
    taken: str
    given: str

    def __str__(self) -> str:
        """As in a sentence."""
        return self.name


FORWARD = Direction("forward", "inputs", "outputs")
BACKWARD = Direction("backward", "output gradients", "input gradients")
TAKEN, GIVEN = (FORWARD.taken, BACKWARD.taken), (FORWARD.given, BACKWARD.given)


class Evidence:
    """What is known of the arrays of torch's calls: each agrees, departs, or was not compared."""

    def __init__(self, trace: Trace):
        self.of: dict[tuple[Call, str], dict[str, str]] = {}
        self._taken = {
            numbers(call, slot, label)
            for call in trace.calls
            for slot in TAKEN
            for label in call.slots[slot]
        }
        self.compared: set[Call] = set()
        """The calls that have counterparts which are modules or taps."""
        self.cut: set[Call] = set()
        """The calls whose counterparts give no gradient: JAX stops it in them, or before them."""
        self.similar: set[Call] = set()
        """The calls beside which JAX computes something similar to what they give."""

    def state(self, call: Call, slot: str) -> str:
        """Of all arrays of a slot.

        Of what a call without a counterpart gives, the first array and those that matter, since
        another call takes them or they have a gradient, may not be unknown: that JAX computes a
        layer's attention weights somewhere says nothing of the layer's own output.
        """
        states = self.of.get((call, slot), {})
        if DEPARTS in states.values():
            return DEPARTS
        if slot in GIVEN and call not in self.compared:
            telling = [label for label in states if is_telling(call.slots[slot][label])]
            used = [
                label
                for label in telling
                if numbers(call, slot, label) in self._taken
                or (slot == FORWARD.given and label in call.slots[BACKWARD.taken])
            ]
            known = all(states[label] == AGREES for label in (*telling[:1], *used))
            return AGREES if telling and known else UNKNOWN
        return AGREES if AGREES in states.values() else UNKNOWN

    def spread(self, trace: Trace) -> None:
        """What is known of an array holds where torch passes the same numbers on.

        Of several such places, the last before tells; of those after, the first.
        """
        when: dict[tuple[Call, str], float] = {}
        for index, event in enumerate(trace.events):
            when.setdefault(event, index)
        known: dict[bytes, list[tuple[float, str]]] = {}
        for (call, slot), states in self.of.items():
            at = when.get((call, slot), -1 if slot == "inputs" else np.inf)
            for label, state in states.items():
                if state != UNKNOWN:
                    known.setdefault(numbers(call, slot, label), []).append((at, state))
        for places in known.values():
            places.sort(key=lambda place: place[0])
        for call in trace.calls:
            for slot in (*TAKEN, *GIVEN):
                states, at = self.of.setdefault((call, slot), {}), when.get((call, slot), np.inf)
                for label in call.slots[slot]:
                    if states.get(label, UNKNOWN) != UNKNOWN:
                        continue
                    places = known.get(numbers(call, slot, label), [])
                    before = [state for time, state in places if time <= at]
                    after = [state for time, state in places if time > at]
                    states[label] = (before[-1:] or after[:1] or [UNKNOWN])[0]


def numbers(call: Call, slot: str, label: str) -> bytes:
    """Identifies an array by its numbers, whatever its shape; a constant one by its place."""
    array = call.slots[slot][label]
    if is_constant(array):
        return repr((id(call), slot, label)).encode()
    is_gradient = slot.endswith("gradients")
    return is_gradient.to_bytes() + hashlib.sha256(array.tobytes()).digest()


def is_constant(array: np.ndarray) -> bool:
    """Is it one number, once or everywhere? One that was computed, as a loss is, tells itself."""
    if array.size == 1 and array.dtype.kind == "f" and np.isfinite(array).all():
        return bool(array.flat[0] % ROUND == 0)
    return array.size < 2 or bool((array == array.flat[0]).all())


def is_telling(array: np.ndarray) -> bool:
    """Has it numbers that are computed alone? A mask is also applied without being made."""
    return array.dtype.kind == "f" and not is_constant(array) and mask_of(array) is None
