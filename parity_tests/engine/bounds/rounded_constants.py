"""Constants that one side holds rounded to float32, while the other side has more digits.

Rotary frequencies are an example: torch keeps them in a float32 buffer that is in no `state_dict`,
and a port computes them. In float64, the two sides then differ by the rounding of the constants. To
find out whether they also differ in something else, the reference runs again with JAX's digits. If
no further digits of a constant are known, the constant is instead moved by as much as its rounding.
Results that move may then differ as far as they move; all others must agree.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from parity_tests.engine.bounds.tolerance import CONSTANT_ULPS, DECIMAL_DIGITS, ulp

Digits = Callable[[np.ndarray], np.ndarray]
"""A function that replaces the constants among the numbers of an array by more exact ones."""
MOST_NAMES = 3
"""The largest number of constants that a note names."""


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
        fits_float32 = values.astype(np.float32) == values
        is_exact = (values.astype(ml_dtypes.bfloat16) == values) | (values == np.round(values))
    short = short_decimal(values)
    return np.isfinite(values) & fits_float32 & ~is_exact & (short is None or short != values)


def rounded_count(values: Iterable[np.ndarray]) -> int:
    """The number of entries of these constants that are rounded to float32."""
    return int(sum(is_rounded(value).sum() for value in values))


class Moves(NamedTuple):
    """Relative changes of constants that are rounded to float32, an array for each constant."""

    to_digits: list[np.ndarray]
    """They give the reference's constants the model's float64 digits, where these are known."""
    by_rounding: list[np.ndarray]
    """They change the reference's other constants by as much as their rounding."""
    in_model: list[np.ndarray]
    """They change the model's constants that the reference lacks by as much as their rounding."""

    @property
    def with_rounding(self) -> list[np.ndarray]:
        """The changes of the reference's constants, whether their digits are known or not."""
        return [a + b for a, b in zip(self.to_digits, self.by_rounding, strict=True)]


def find_moves(
    constants: Sequence[np.ndarray],
    model_constants: Sequence[np.ndarray],
    model_arrays: Iterable[np.ndarray],
    weights: Iterable[np.ndarray],
) -> Moves:
    """Finds the float64 digits of constants, and how much those without known digits may be off.

    A constant of the reference gets the digits of the array that contains most of its numbers, with
    either sign. These digits count as unknown if the array contains many other numbers, because it
    may be another one: the sines of small frequencies, for example, are almost the frequencies
    themselves.

    Args:
        constants: the reference's constants.
        model_constants: the model's constants.
        model_arrays: the arrays that the model computes from no input and no weight.
        weights: the reference's weights.

    """
    sizes = (np.unique(np.abs(array[np.isfinite(array)])) for array in model_arrays)
    known = sorted(filter(np.size, sizes), key=np.size)
    to_digits, unknown = [], []
    for value in constants:
        found = [(_move_to(value, numbers), numbers.size) for numbers in known]
        none = np.full(value.shape, np.nan), 0
        best, size = max(found, key=lambda each: np.isfinite(each[0]).sum(), default=none)
        unknown.append(is_rounded(value) & (np.isnan(best) | (size > 2 * value.size)))
        to_digits.append(np.nan_to_num(best))

    # The reference may hold a constant of the model with the same rounding, and with either sign.
    others = [*constants, *weights] if model_constants else []
    numbers = np.concatenate([np.abs(np.ravel(each)) for each in (*others, [0.0])])
    lacking = [is_rounded(each) & ~np.isin(np.abs(each), numbers) for each in model_constants]
    return Moves(to_digits, moved_by_rounding(unknown), moved_by_rounding(lacking))


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


def moved_by_rounding(where: Iterable[np.ndarray]) -> list[np.ndarray]:
    """Relative changes as large as a constant's rounding, with random signs, within the masks."""
    rng = np.random.default_rng(0)
    size = CONSTANT_ULPS * ulp(np.float32)
    return [size * each * rng.choice([-1.0, 1.0], each.shape) for each in where]


def are_moved(moves: Iterable[np.ndarray]) -> bool:
    """True if any constant changes."""
    return any(move.any() for move in moves)


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


def note_on_constants(count: int, names: Sequence[str]) -> str:
    """The start of a note on rounded constants, with names by which a user finds them in the code.

    `count` is the number of their entries.
    """
    numbers = "1 constant is" if count == 1 else f"{count} numbers of constants are"
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    named = f" ({', '.join(names[:MOST_NAMES])}{more})" if names else ""
    return f"{numbers} in float32{named}: float64 is compared"
