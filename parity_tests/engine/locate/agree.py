"""Are two arrays the same numbers, whatever the order of their axes?"""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from parity_tests.engine.bounds.tolerance import FLOAT64, rms

NUMBERS = "biufcV"
"""The kinds of dtypes: ml_dtypes' are of kind V."""
MASKED = -1e3
"""Numbers below it, in an array that has no others but zero, are an additive mask."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far two arrays are from each other, and in what layout they are closest."""

    error: float
    layout: str = ""
    """Empty if the axes have the same order."""


def difference(
    actual: np.ndarray, expected: np.ndarray, bound: float, largest: float = 0.0
) -> Difference | None:
    """The error relative to the expected array; None if they are numbers of different kinds.

    In the axes' own order where the shapes agree, unless only another order is within the bound.
    `largest`: beside numbers of this size, those of an array that are all rounding count as zero.
    """
    if not {actual.dtype.kind, expected.dtype.kind} <= {*NUMBERS}:
        return None
    if (actual.dtype == bool) != (expected.dtype == bool):
        # one side's boolean mask says what to keep, or what to leave, and the other's is added
        kept, wanted = (x if x.dtype == bool else mask_of(x) for x in (actual, expected))
        if kept is None or wanted is None:
            return None
        either = (difference(each, wanted, bound) for each in (kept, ~kept))
        return min((each for each in either if each), key=lambda each: each.error)
    actual, expected = _plain(actual), _plain(expected)
    if actual.dtype.kind != expected.dtype.kind:
        return None
    closest = None
    for layout, candidate in layouts(actual, expected.shape):
        error = _error(candidate, expected, largest)
        if closest is None or error <= bound:
            closest = Difference(error, layout)
        if closest.error <= bound:
            break
    if closest is None:
        return Difference(np.inf, f"shape {actual.shape}, not {expected.shape}")
    return closest


def mask_of(x: np.ndarray) -> np.ndarray | None:
    """Where an additive mask is zero, or one of ones and zeros is one; None if it is neither."""
    if ((x == 0) | (x == 1)).all():
        return x == 1
    return x == 0 if ((x < MASKED) | (x == 0)).all() else None


def _plain(x: np.ndarray) -> np.ndarray:
    """In float64 or int64; what an additive mask leaves out is the same whatever it adds."""
    if x.dtype.kind in "biu":
        return x.astype(np.int64)
    if x.dtype.kind == "c":
        return x.astype(np.complex128)[..., None].view(float)
    x = x.astype(float)
    return np.maximum(x, MASKED) if (x <= MASKED).any() and mask_of(x) is not None else x


def layouts(x: np.ndarray, shape: tuple[int, ...]) -> Iterator[tuple[str, np.ndarray]]:
    """The array in each layout that could be this shape, the most likely first."""
    if x.shape == shape:
        yield "", x
    squeezed = tuple(n for n in shape if n != 1)
    short = x.squeeze()
    if short.ndim <= 6 and sorted(short.shape) == sorted(squeezed):
        orders = itertools.permutations(range(short.ndim))
        for order in sorted(orders, key=_moves):
            if tuple(short.shape[i] for i in order) == squeezed and not (
                x.shape == shape and _moves(order) == 0
            ):
                layout = "" if _moves(order) == 0 else f"axes {order}"
                yield layout, short.transpose(order).reshape(shape)
    elif x.size == np.prod(shape, dtype=int):
        yield "reshaped", x.reshape(shape)
    elif x.size < np.prod(shape, dtype=int):
        try:
            yield "broadcast", np.broadcast_to(x, shape)
        except ValueError:
            return


def _moves(order: tuple[int, ...]) -> int:
    """How many pairs of axes have changed their order; moving the channels is few."""
    return sum(a > b for a, b in itertools.combinations(order, 2))


def _error(actual: np.ndarray, expected: np.ndarray, largest: float) -> float:
    if expected.dtype.kind == "i":
        return float(np.mean(actual != expected)) if actual.size else 0.0
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    off = np.where(same, 0.0, np.subtract(actual, expected, where=~same, out=np.zeros(same.shape)))
    scale = rms(expected[np.isfinite(expected)])
    if scale <= FLOAT64 * largest:
        scale = largest
    return rms(off) / (scale or 1.0) if np.isfinite(off).all() else np.inf
