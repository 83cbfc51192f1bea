"""Divides a JAX call over a whole sequence into its steps, for torch modules that run step by step.

A loop over a `torch.nn.LSTMCell`, for example, corresponds to one call of an LSTM layer.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from parity_tests.engine.problem import Arrays
from parity_tests.engine.traces.trace import BACKWARD, FORWARD, SLOTS, Call


def calls_of_steps(jax_call: Call, reference: Sequence[Call]) -> list[Call]:
    """The part of a JAX call that corresponds to each of torch's calls, in their order.

    A part has the slices of JAX's arrays along time. An initial state belongs to the first part,
    and a last one to the last. The list is empty if JAX's outputs are not divided into such steps.
    """
    steps = [
        dataclasses.replace(jax_call, slots={slot: {} for slot in SLOTS}, identities={})
        for _ in reference
    ]
    for values, gradients, end in (
        (FORWARD.incoming, BACKWARD.outgoing, steps[0]),
        (FORWARD.outgoing, BACKWARD.incoming, steps[-1]),
    ):
        for label, array in jax_call.slots[values].items():
            axis = _time_axis(array, [call.slots[values] for call in reference])
            for slot in (values, gradients):
                found = jax_call.slots[slot].get(label)
                if found is None or found.shape != array.shape:
                    continue
                parts = [(end, found)]
                if axis is not None:
                    parts = zip(steps, np.moveaxis(found, axis, 0), strict=True)
                for step, part in parts:
                    step.slots[slot][label] = part
    if not steps[0].slots[FORWARD.outgoing]:
        return []
    _join_repeated_outputs(steps)
    _add_gradients_of_states(steps, reference)
    return steps


def _time_axis(array: np.ndarray, expected: list[Arrays]) -> int | None:
    """The axis of a sequence's time; None if no axis can be it.

    If several axes have the right size, it is the one where the numbers are closest to torch's.
    """
    distances = [
        (float(np.linalg.norm(steps - stack)), axis)
        for stack in _stacks(expected)
        for axis in range(array.ndim)
        if (steps := np.moveaxis(array, axis, 0)).shape == stack.shape
    ]
    return min(distances)[1] if distances else None


def _stacks(expected: list[Arrays]) -> Iterator[np.ndarray]:
    """For each label under which all calls have an array of one shape, these arrays, stacked."""
    for label in expected[0]:
        arrays = [each[label] for each in expected if label in each]
        if len(arrays) == len(expected) and len({each.shape for each in arrays}) == 1:
            yield np.stack(arrays)


def _join_repeated_outputs(steps: list[Call]) -> None:
    """Removes a last state that repeats the last output, and gives its gradient to the output."""
    outputs, gradients = (steps[-1].slots[slot] for slot in (FORWARD.outgoing, BACKWARD.incoming))
    for label in steps[0].slots[FORWARD.outgoing]:
        repeated = [
            other
            for other, array in outputs.items()
            if other != label and array.tobytes() == outputs[label].tobytes()
        ]
        for other in repeated:
            del outputs[other]
            if other in gradients:
                gradient = gradients.pop(other).reshape(outputs[label].shape)
                gradients[label] = gradients.get(label, 0) + gradient


def _add_gradients_of_states(steps: list[Call], reference: Sequence[Call]) -> None:
    """Adds to each output's gradient what torch's next step gives back for it.

    In torch, the output is the state that the next step takes, so its gradient includes that of the
    state. The gradient of JAX's outputs does not.
    """
    for step, (call, after) in zip(steps, itertools.pairwise(reference), strict=False):
        gradients = step.slots[BACKWARD.incoming]
        for label, array in step.slots[FORWARD.outgoing].items():
            state = _closest(array, call.slots[FORWARD.outgoing]).tobytes()
            for taken, gradient in after.slots[BACKWARD.outgoing].items():
                if label in gradients and after.slots[FORWARD.incoming][taken].tobytes() == state:
                    gradients[label] = gradients[label] + gradient


def _closest(array: np.ndarray, others: Arrays) -> np.ndarray:
    """The array of the same shape that is closest."""
    return min(
        (other for other in others.values() if other.shape == array.shape),
        key=lambda other: float(np.linalg.norm(other - array)),
    )
