"""Compares the arrays of a torch call with those of its counterpart.

The counterpart is one JAX call, or several, such as those of a cell that JAX calls at each step.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from parity_tests.engine.locate.values import is_constant, is_telling
from parity_tests.engine.problem import Arrays
from parity_tests.engine.traces.trace import BACKWARD, FORWARD, Call

VALUES_OF = {BACKWARD.incoming: FORWARD.outgoing, BACKWARD.outgoing: FORWARD.incoming}
"""For each slot of gradients, the slot of the arrays that they belong to."""


class Place(NamedTuple):
    """The place of an array in a slot of a counterpart."""

    label: str
    is_last: bool = False
    """Whether only the last call counts: the last state of a layer is the one of its last step."""

    def of(self, arrays: Arrays) -> np.ndarray | None:
        """The array in this place, or None if there is no such array."""
        array = arrays.get(self.label)
        return array[-1] if self.is_last and array is not None else array


def passed_on(calls: list[Call]) -> dict[tuple[Call, str], tuple[Call, str]]:
    """For each input that a call takes from an earlier one of these calls, the earlier output."""
    outputs: dict[bytes, tuple[Call, str]] = {}
    found: dict[tuple[Call, str], tuple[Call, str]] = {}
    for call in calls:
        for label, array in call.slots[FORWARD.incoming].items():
            if array.tobytes() in outputs:
                found[call, label] = outputs[array.tobytes()]
        for label, array in call.slots[FORWARD.outgoing].items():
            if not is_constant(array):
                outputs.setdefault(array.tobytes(), (call, label))
    return found


def is_chain(calls: list[Call]) -> bool:
    """True if each call takes something from an earlier one."""
    return len({call for call, _ in passed_on(calls)}) == len(calls) - 1


def joined(calls: list[Call], slot: str) -> Arrays:
    """The arrays in a slot of several calls, as if they were one call.

    The arrays under a label are stacked. An input that a call takes from an earlier call is left
    out, and so is the gradient that it gives back to the earlier call.
    """
    if len(calls) == 1:
        return calls[0].slots[slot]
    arrays = {(call, label): array for call in calls for label, array in call.slots[slot].items()}
    for (call, label), source in passed_on(calls).items():
        if slot in (FORWARD.incoming, BACKWARD.outgoing):
            arrays.pop((call, label), None)
        elif slot == BACKWARD.incoming and label in call.slots[BACKWARD.outgoing]:
            arrays[source] = arrays.get(source, 0) - call.slots[BACKWARD.outgoing][label]
    result: Arrays = {}
    for label in dict.fromkeys(label for _, label in arrays):
        found = [arrays.get((call, label)) for call in calls]
        if slot == BACKWARD.incoming:  # the outputs of only some of the calls may be used
            found = [
                np.zeros_like(call.slots[FORWARD.outgoing][label]) if array is None else array
                for call, array in zip(calls, found, strict=True)
                if label in call.slots[FORWARD.outgoing]
            ]
        found = [array for array in found if array is not None]
        if len({array.shape for array in found}) == 1:
            result[label] = np.stack(found) if len(found) > 1 else found[0]
    return result


def corresponding_places(
    expected: Arrays, calls: list[Call], slot: str, agrees: Callable[[str, np.ndarray], bool]
) -> dict[str, Place]:
    """The place of JAX's array for each of torch's labels in a slot of inputs or outputs.

    Arrays that agree correspond, whatever their labels. The others correspond by label and shape,
    then by shape, then by size.
    """
    unused = {Place(label): array for label, array in joined(calls, slot).items()}
    whole = {*unused}
    if len(calls) > 1 and slot == FORWARD.outgoing:
        unused |= {
            Place(label, is_last=True): last
            for label, last in calls[-1].slots[slot].items()
            if Place(label) in whole and unused[Place(label)].ndim > last.ndim
        }
    keys = (
        lambda label, array: (label, array.shape),
        lambda label, array: array.shape,
        lambda label, array: array.size,
        lambda label, array: None,
    )
    places: dict[str, Place] = {}
    for key, must_agree in [*((key, True) for key in keys), *((key, False) for key in keys[:-1])]:
        for label, array in expected.items():
            fitting = (
                place
                for place, actual in unused.items()
                if (actual.dtype.kind in "fcV") == (array.dtype.kind in "fcV")
                and key(place.label, actual) == key(label, array)
                and (agrees(label, actual) if must_agree else place in whole)
            )
            if label not in places and (place := next(fitting, None)) is not None:
                places[label] = place
                del unused[place]
    if not places and len(expected) == len(whole) == 1:
        return dict(zip(expected, whole, strict=True))
    return places


Repetitions = dict[str, tuple[str, np.ndarray]]
"""For the label of a repeated array, the label of the array around it, and the indices in that."""


def repetitions(arrays: Arrays, targets: Iterable[str]) -> Repetitions:
    """The arrays whose numbers are a part of a larger one, or equal to an earlier one.

    For example, the last state of a recurrent layer is a part of its outputs. `targets` are the
    labels of the arrays that may be repeated.
    """
    found: Repetitions = {}
    largest_first = sorted(dict.fromkeys(targets), key=lambda label: -arrays[label].size)
    for label in sorted(arrays, key=lambda label: -arrays[label].size):
        for target in itertools.takewhile(lambda each, label=label: each != label, largest_first):
            indices = _indices(arrays[label], arrays[target]) if target not in found else None
            if indices is not None:
                found[label] = target, indices
                break
    return found


def _indices(part: np.ndarray, whole: np.ndarray) -> np.ndarray | None:
    """The indices of an array's numbers in another one; None if one of them has no single index."""
    if not is_telling(part) or not is_telling(whole):
        return None
    if part.tobytes() == whole.tobytes():
        return np.arange(part.size)
    order = np.argsort(whole, axis=None)
    numbers = whole.ravel()[order]
    first, after = (np.searchsorted(numbers, part.ravel(), side) for side in ("left", "right"))
    return order[first] if (after - first == 1).all() else None


def gradients_of_all_uses(arrays: Arrays, gradients: Arrays, repeated: Repetitions) -> Arrays:
    """The gradients, where the gradient of an array includes those of its repetitions.

    A caller may use either of them with the same result.
    """
    total = dict(gradients)
    for label, (target, indices) in repeated.items():
        if label in total:
            whole = np.array(total.get(target, np.zeros(arrays[target].shape)))
            whole.reshape(-1)[indices] += total.pop(label).ravel()
            total[target] = whole
    return total
