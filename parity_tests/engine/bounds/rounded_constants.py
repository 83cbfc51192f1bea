"""Constants that one side holds rounded to float32, while the other side has more digits.

Rotary frequencies are an example: torch keeps them in a float32 buffer that is in no `state_dict`,
and a port computes them. In float64, the two sides then differ by the rounding of the constants. To
find out whether they also differ in something else, the reference runs again with JAX's digits. If
no further digits of a constant are known, the constant is instead moved by as much as its rounding.
Results that move may then differ as far as they move; all others must agree.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from parity_tests.engine.bounds.tolerance import CONSTANT_ULPS, DECIMAL_DIGITS, ulp

Digits = Callable[[np.ndarray], np.ndarray]
"""A function that replaces the constants among the numbers of an array by more exact ones."""


def short_decimal(value: Any) -> float | None:
    """The short decimal, such as 1e-5, whose rounding to float32 is this number; None if none."""
    if np.ndim(value):
        return None
    with np.errstate(over="ignore"):
        rounded = np.float32(value)
    is_short = sum(map(str.isdigit, str(rounded).partition("e")[0])) <= DECIMAL_DIGITS
    return float(str(rounded)) if is_short and rounded == value else None


def is_rounded(values: Any) -> np.ndarray:
    """A mask of the numbers that float32 represents, and that may thus have been rounded to it.

    Integers, short decimals and numbers that bfloat16 represents, such as 1/2, do not count. The
    array's dtype says nothing, because NumPy promotes float32 to float64.
    """
    values = np.asarray(values, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        of_float32 = values.astype(np.float32) == values
        is_exact = (values.astype(ml_dtypes.bfloat16) == values) | (values == np.round(values))
    short = short_decimal(values)
    return np.isfinite(values) & of_float32 & ~is_exact & (short is None or short != values)


def rounded_count(values: Iterable[np.ndarray]) -> int:
    """The number of entries of these constants that are rounded to float32."""
    return int(sum(is_rounded(value).sum() for value in values))


def moves_to_digits(
    values: Iterable[np.ndarray], arrays: Iterable[np.ndarray]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The moves that give each constant the digits of an array, and masks of what no array has.

    A move is a relative change of each number. Each constant gets the digits of the array that
    contains most of its numbers, with either sign. The digits count as unknown if this array
    contains many other numbers, because the array may be another one: the sines of small
    frequencies, for example, are almost the frequencies themselves.
    """
    sizes = [np.unique(np.abs(array[np.isfinite(array)])) for array in arrays]
    known = sorted(filter(np.size, sizes), key=np.size)
    moves, unknown = [], []
    for value in values:
        found = [(_move_to(value, numbers), numbers.size) for numbers in known]
        none = np.full(value.shape, np.nan), 0
        best, size = max(found, key=lambda each: np.isfinite(each[0]).sum(), default=none)
        unknown.append(is_rounded(value) & (np.isnan(best) | (size > 2 * value.size)))
        moves.append(np.nan_to_num(best))
    return moves, unknown


def _move_to(value: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The relative change of each number to the nearest of `numbers`, which are sorted.

    NaN if none is as near as the rounding of a constant, or if the value is not rounded.
    """
    size = np.where(value == 0, 1, np.abs(value))
    after = np.searchsorted(numbers, size)
    with np.errstate(over="ignore"):
        below, above = (np.take(numbers, i, mode="clip") / size - 1 for i in (after - 1, after))
    nearest = np.where(np.abs(below) < np.abs(above), below, above)
    is_near = np.abs(nearest) <= CONSTANT_ULPS * ulp(np.float32)
    return np.where(is_rounded(value) & is_near, nearest, np.nan)


def unknown_numbers(values: Sequence[np.ndarray], others: Iterable[np.ndarray]) -> list[np.ndarray]:
    """Masks of the numbers that are rounded to float32 and do not occur in the other arrays.

    A number occurs if another array contains it with either sign.
    """
    if not rounded_count(values):
        return []
    numbers = np.concatenate([np.abs(np.ravel(other)) for other in [np.zeros(1), *others]])
    return [is_rounded(value) & ~np.isin(np.abs(value), numbers) for value in values]


def moved_by_rounding(where: Iterable[np.ndarray]) -> list[np.ndarray]:
    """Relative changes as large as a constant's rounding, with random signs, within the masks."""
    rng = np.random.default_rng(0)
    size = CONSTANT_ULPS * ulp(np.float32)
    return [size * each * rng.choice([-1.0, 1.0], each.shape) for each in where]


def digits_of(values: Iterable[np.ndarray], moves: Iterable[np.ndarray]) -> Digits:
    """The function that scales each number of some constants by 1 + its move."""
    numbers, factors = (
        np.concatenate([np.ravel(np.asarray(each, np.float64)) for each in arrays])
        for arrays in (values, moves)
    )
    order = np.argsort(numbers)
    numbers, factors = numbers[order], 1 + factors[order]

    def digits(array: np.ndarray) -> np.ndarray:
        index = np.minimum(np.searchsorted(numbers, array), numbers.size - 1)
        return np.where(numbers[index] == array, array * factors[index], array)

    return digits


def named_by_number(values: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    """Constants without names, numbered."""
    return {f"constant {i}": value for i, value in enumerate(values)}


def names_of(constants: Mapping[str, np.ndarray]) -> list[str]:
    """The names of constants, each with its value if it is a scalar, or else its shape."""
    return [
        f"{name} {value.shape}" if value.ndim else f"{name} = {value:.9g}"
        for name, value in constants.items()
    ]
