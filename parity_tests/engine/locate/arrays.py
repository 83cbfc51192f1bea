"""Which of JAX's arrays is to be compared with which of the reference's."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from parity_tests.engine.locate.record import Call, Rows


def stacked(calls: tuple[Call, ...], slot: str) -> Rows:
    """The arrays of a module's calls, the calls as an axis if they are more than one."""
    if len(calls) == 1:
        return calls[0].slots[slot]
    return {
        label: np.stack(arrays)
        for label, arrays in _common(calls, slot)
        if len({array.shape for array in arrays}) == 1
    }


def of_both(call: Call, our_calls: tuple[Call, ...], slot: str) -> tuple[Rows, Rows]:
    """What a call of the reference has in a slot, and what JAX's calls of its work have.

    These are several modules where a port splits a joint projection.
    """
    expected = call.slots[slot]
    if len({ours.name for ours in our_calls}) == 1:
        return expected, stacked(our_calls, slot)
    if slot in ("outputs", "output gradients"):
        expected = {label: in_order(array) for label, array in expected.items() if array.ndim}
    return expected, of_parts(our_calls, slot)


def of_parts(calls: tuple[Call, ...], slot: str) -> Rows:
    """What several modules take and give together, the features `in_order`."""
    if slot == "inputs":
        return calls[0].slots[slot]
    if slot == "input gradients":
        return {label: each.sum(axis=0) for label, each in stacked(calls, slot).items()}
    return {
        label: in_order(np.concatenate(arrays, axis=-1))
        for label, arrays in _common(calls, slot)
        if len({array.shape[:-1] for array in arrays}) == 1 and all(a.ndim for a in arrays)
    }


def in_order(array: np.ndarray) -> np.ndarray:
    """The features of each place by their size: nobody says which part gives which."""
    return np.sort(array, axis=-1)


def _common(calls: tuple[Call, ...], slot: str) -> Iterator[tuple[str, list[np.ndarray]]]:
    """The arrays that all calls have, by label."""
    for label in calls[0].slots[slot]:
        if all(label in call.slots[slot] for call in calls):
            yield label, [call.slots[slot][label] for call in calls]


def assigned(expected: Rows, actual: Rows) -> Iterator[tuple[str, np.ndarray]]:
    """Which of JAX's arrays is which of torch's: of one label, shape and place, or what is left."""
    left, wanted = dict(actual), dict(expected)
    for same in (
        lambda e, a: e == a and _fits(wanted[e], left[a], exact=True),
        lambda e, a: _fits(wanted[e], left[a], exact=True),
        lambda e, a: _fits(wanted[e], left[a], exact=False),
    ):
        for label in [*wanted]:
            for candidate in [*left]:
                if same(label, candidate):
                    yield label, left.pop(candidate)
                    del wanted[label]
                    break
    if len(wanted) == len(left) == 1:
        yield next(iter(wanted)), next(iter(left.values()))


def _fits(expected: np.ndarray, actual: np.ndarray, *, exact: bool) -> bool:
    kinds = [jnp.issubdtype(a.dtype, jnp.floating) for a in (expected, actual)]
    if kinds[0] != kinds[1]:
        return False
    return expected.shape == actual.shape if exact else expected.size == actual.size
