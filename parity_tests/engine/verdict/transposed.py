"""Finds square kernels that were loaded without transposing them, or transposed twice."""

import itertools
import re
from collections.abc import Iterator

import numpy as np

from parity_tests.engine.bounds.tolerance import relative_errors
from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.problem import Arrays, Problem, in_dtype
from parity_tests.engine.references.reference import Reference
from parity_tests.engine.results import GROUPS, only_floating
from parity_tests.engine.verdict.report import Report

STACKED = re.compile(r"(weight_[ih]h(_l\d+)?(_reverse)?|in_proj_weight)$")
"""The weights in which torch stacks the kernels of gates, or of queries, keys and values."""
MOST_RUNS = 32
"""The largest number of forward passes that are tried."""
MOST_NAMES = 3
"""The largest number of weights that a fault names."""


def faults_of_transposed_kernels(
    problem: Problem, reference: Reference, report: Report, jax_side: JaxSide
) -> list[str]:
    """A fault that names the kernels to transpose, if differing results then agree.

    The axes in and out of a square kernel have the same size, so the wrong order raises no error.
    The reference runs with these axes exchanged: in all kernels, in those that have the same
    place in each block, because one line of a loader loads them, and in each kernel alone.
    """
    dtype, group, error = next(report.failures, ("", "", None))
    weights = {key: reference.weights.arrays[key] for key in reference.weights.parameters}
    square = {key: array for key, array in weights.items() if is_square(key, array)}
    kernels = {key: swapped(in_dtype(array, "float64")) for key, array in square.items()}
    if error is None or group not in GROUPS[:2] or not kernels:
        return []
    forward = reference.oracle.forward
    actual = jax_side.run(problem, dtype, forward, reference.cast_to)
    for keys in itertools.islice(sets_of_keys(kernels), MOST_RUNS):
        expected = reference.forward_with({key: kernels[key] for key in keys})
        errors = (
            relative_errors(only_floating(actual[group]), only_floating(expected[group]))
            for group in expected or ()
        )
        if expected and all(each <= error.bound for named in errors for each in named.values()):
            more = f" and {len(keys) - MOST_NAMES} more" if len(keys) > MOST_NAMES else ""
            return [
                "weights: both sides agree if these kernels are transposed when they are loaded: "
                f"{', '.join(keys[:MOST_NAMES])}{more}. They are square, so the wrong order "
                "of axes raises no error: torch's Linear and Conv have (out, in), and most kernels "
                "in JAX have (in, out)"
            ]
    return []


def is_square(key: str, array: np.ndarray) -> bool:
    """True for a kernel, or stacked kernels, with as many inputs as outputs."""
    if array.ndim < 2 or array.shape[1] < 2:
        return False
    stacked = array.ndim == 2 and STACKED.search(key) is not None
    return array.shape[0] == array.shape[1] or (stacked and array.shape[0] % array.shape[1] == 0)


def swapped(array: np.ndarray) -> np.ndarray:
    """The square kernels, each with its first two axes exchanged."""
    size = array.shape[1]
    return array.reshape(-1, size, size, *array.shape[2:]).swapaxes(1, 2).reshape(array.shape)


def sets_of_keys(kernels: Arrays) -> Iterator[tuple[str, ...]]:
    """All keys, then those of each place in a block, whose numbers alone differ, then each key."""
    places: dict[str, list[str]] = {}
    for key in kernels:
        places.setdefault(re.sub(r"\d+", "#", key), []).append(key)
    sets = [tuple(kernels), *map(tuple, places.values()), *zip(kernels, strict=True)]
    yield from dict.fromkeys(sets)
