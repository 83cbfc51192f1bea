"""Compares the numbers of two arrays, whatever the order of their axes."""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator

import numpy as np

from parity_tests.engine.bounds.tolerance import FLOAT64, rms
from parity_tests.engine.traces.trace import Call

NUMBERS = "biufcV"
"""The kinds of dtypes that are numbers: those of ml_dtypes are of kind V."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far two arrays are apart, and the layout in which they are closest."""

    error: float
    layout: str = ""
    """Empty if the axes have the same order."""


def difference(
    actual: np.ndarray, expected: np.ndarray, bound: float, largest: float = 0.0
) -> Difference | None:
    """The error relative to the expected array; None if the kinds of numbers differ.

    The axes are compared in their own order, unless only another order is within the bound. If the
    expected array is only rounding beside numbers of the size `largest`, the error is relative to
    `largest`.
    """
    if not {actual.dtype.kind, expected.dtype.kind} <= {*NUMBERS}:
        return None
    if (actual.dtype == bool) != (expected.dtype == bool):
        # a boolean mask may mark what to keep or what to hide; an additive mask is equivalent to it
        masks = [x if x.dtype == bool else mask_of(x) for x in (actual, expected)]
        if masks[0] is None or masks[1] is None:
            return None
        either = (difference(each, masks[1], bound) for each in (masks[0], ~masks[0]))
        return min((each for each in either if each), key=lambda each: each.error)
    actual, expected = comparable(actual), comparable(expected)
    if actual.dtype.kind != expected.dtype.kind:
        return None
    closest = None
    for layout, candidate in layouts(actual, expected.shape):
        error = _relative_error(candidate, expected, largest)
        if closest is None or error <= bound:
            closest = Difference(error, layout)
        if closest.error <= bound:
            break
    return closest or Difference(np.inf, f"shape {actual.shape}, not {expected.shape}")


def mask_of(x: np.ndarray) -> np.ndarray | None:
    """The places that a mask keeps; None if the array is not a mask.

    A mask consists of ones, which keep, and zeros, which hide; or, if it is additive, of zeros,
    which keep, and numbers whose exponential is zero, which hide.
    """
    if ((x == 0) | (x == 1)).all():
        return x == 1
    x = np.real(x).astype(float)
    return x == 0 if (x <= 0).all() and np.isin(np.exp(x), (0, 1)).all() else None


def comparable(x: np.ndarray) -> np.ndarray:
    """The numbers in float64 or int64; additive masks that hide the same places become equal."""
    if x.dtype.kind in "biu":
        return x.astype(np.int64)
    if x.dtype.kind == "c":
        return x.astype(np.complex128)[..., None].view(float)
    x = x.astype(float, copy=False)
    is_mask = (x < 0).any() and mask_of(x) is not None
    return np.where(x < 0, -np.inf, 0.0) if is_mask else x


def layouts(x: np.ndarray, shape: tuple[int, ...]) -> Iterator[tuple[str, np.ndarray]]:
    """The array in each layout that could have this shape, the most likely first."""
    if x.shape == shape:
        yield "", x
    squeezed = tuple(n for n in shape if n != 1)
    compact = x.squeeze()
    if compact.ndim <= 6 and sorted(compact.shape) == sorted(squeezed):
        for order in sorted(itertools.permutations(range(compact.ndim)), key=_inversions):
            is_same = _inversions(order) == 0
            if tuple(compact.shape[i] for i in order) == squeezed and not (
                x.shape == shape and is_same
            ):
                yield ("" if is_same else f"axes {order}", compact.transpose(order).reshape(shape))
    elif x.size == np.prod(shape, dtype=int):
        yield "reshaped", x.reshape(shape)
    elif x.size < np.prod(shape, dtype=int):
        try:
            yield "broadcast", np.broadcast_to(x, shape)
        except ValueError:
            return


def closest_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """The least error in any layout."""
    actual, expected = comparable(actual), comparable(expected)
    least = np.inf
    for _, each in layouts(actual, expected.shape):
        least = min(least, _relative_error(each, expected, 0.0))
        if least <= FLOAT64:
            break
    return least


def _inversions(order: tuple[int, ...]) -> int:
    """The number of pairs of axes whose order is changed; small if only the channels move."""
    return sum(a > b for a, b in itertools.combinations(order, 2))


def _relative_error(actual: np.ndarray, expected: np.ndarray, largest: float) -> float:
    if expected.dtype.kind == "i":
        return float(np.mean(actual != expected)) if actual.size else 0.0
    differ = (actual != expected) & ~(np.isnan(actual) & np.isnan(expected))
    errors = np.subtract(actual, expected, where=differ, out=np.zeros(expected.shape))
    scale = rms(expected[np.isfinite(expected)])
    if scale <= FLOAT64 * largest:
        scale = largest
    return rms(errors) / (scale or 1.0) if np.isfinite(errors).all() else np.inf


def identity(call: Call, slot: str, label: str) -> bytes:
    """Identifies an array by its numbers, whatever its shape, or by its place if it is constant."""
    if (slot, label) not in call.identities:
        array = call.slots[slot][label]
        found = repr((call.index, slot, label)).encode()
        if not is_constant(array):
            kind = slot.endswith("gradients").to_bytes()
            found = kind + hashlib.sha256(array.tobytes()).digest()
        call.identities[slot, label] = found
    return call.identities[slot, label]


def is_constant(array: np.ndarray) -> bool:
    """True if the array repeats one number, or is a scalar that float16 represents exactly.

    A computed scalar, such as a loss, does not count, because it has more digits.
    """
    if array.size == 1 and array.dtype.kind == "f" and np.isfinite(array).all():
        with np.errstate(over="ignore"):
            return bool(array.flat[0] == array.flat[0].astype(np.float16))
    return array.size < 2 or bool((array == array.flat[0]).all())


def is_telling(array: np.ndarray) -> bool:
    """True if JAX can hardly have the numbers without the same computation.

    Integers, constants and masks do not count. A mask need not even be an array in JAX.
    """
    return array.dtype.kind == "f" and not is_constant(array) and mask_of(array) is None
