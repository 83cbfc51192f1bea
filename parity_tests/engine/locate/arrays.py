"""Which of JAX's arrays is to be compared with which of the reference's."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from parity_tests.engine.locate.record import Call, Rows


def stacked(calls: tuple[Call, ...], slot: str) -> Rows:
    """The arrays of several calls, the calls as an axis if they are more than one."""
    first, *rest = calls
    if not rest:
        return first.slots[slot]
    return {
        label: np.stack([call.slots[slot][label] for call in calls])
        for label, array in first.slots[slot].items()
        if all(
            label in call.slots[slot] and call.slots[slot][label].shape == array.shape
            for call in rest
        )
    }


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
