"""What a JAX side is measured against."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from parity_tests.engine.bounds.rounded_constants import names_of, rounded_count
from parity_tests.engine.faults import overflows
from parity_tests.engine.logits import LogitsError, logits_array, logits_error
from parity_tests.engine.problem import Problem
from parity_tests.engine.progress import Say
from parity_tests.engine.results import (
    GROUPS,
    ErrorsByGroup,
    Results,
    errors_of,
    largest_by_group,
    replayed,
)

if TYPE_CHECKING:
    from parity_tests.engine.traces.reference_trace import ReferenceTrace

Place = tuple[str, str]
"""Group and name of a result."""


@dataclasses.dataclass(frozen=True)
class RunErrors:
    """How far a reference's own run in a dtype is off, and its dtypes."""

    errors: ErrorsByGroup
    """The errors relative to the reference in float64."""
    dtypes: Mapping[Place, Any]
    """The dtypes of its results."""
    overflows: tuple[str, ...] = ()
    """Why nothing can be compared in this dtype."""
    logits: LogitsError | None = None


class Reference(abc.ABC):
    """A torch module, a record of one, or a JAX model, against which a JAX side is measured.

    Each run is made when it is first needed.
    """

    sides: tuple[str, str] = ("torch", "JAX")
    """What reports call the reference, and what is measured."""
    problem: Problem
    name: str
    """The name of the reference's class."""
    seed: int
    _say: Say
    oracle: Results
    """The results in float64, without the reference's own casts to coarser dtypes."""
    cast_to: Sequence[str] = ()
    """The dtypes of these casts, as JAX calls them."""
    faults: Sequence[str] = ()
    """Why nothing can be compared."""
    notes: Sequence[str] = ()

    @functools.cached_property
    def own_run(self) -> Callable[[str], RunErrors]:
        """How far the reference's own run in a dtype is from the one in float64."""
        return functools.cache(self._own_run)

    def _own_run(self, dtype: str) -> RunErrors:
        theirs, oracle = self.sides[0], self.oracle
        self._say(f"{theirs} in {dtype}")
        results = oracle if dtype == "float64" else self._results_in(dtype)
        error = None
        if self.problem.logits:
            group, name = logits_array(self.problem.logits, oracle)
            error = logits_error(results[group][name], oracle[group][name])
        return RunErrors(
            errors_of(results, oracle),
            self._dtypes_in(dtype, results),
            tuple(overflows(oracle, results, f"{dtype} {theirs}")),
            error,
        )

    @abc.abstractmethod
    def _results_in(self, dtype: str) -> Results:
        """The results in a dtype coarser than float64."""

    def _dtypes_in(self, dtype: str, results: Results) -> Mapping[Place, Any]:
        """The dtypes of outputs and states, with the reference's own casts."""
        return {
            (group, name): array.dtype
            for group in GROUPS[:2]
            for name, array in results.get(group, {}).items()
        }

    @functools.cached_property
    def rounded(self) -> Callable[[str], Iterator[ErrorsByGroup]]:
        """The errors of runs in float64 that are rounded to a dtype at random, each run once."""
        runs = functools.cache(lambda dtype: replayed(self._rounded(dtype)))
        return lambda dtype: runs(dtype)()

    def scatter(self, dtype: str) -> ErrorsByGroup:
        """The largest errors of the runs of `rounded`."""
        return largest_by_group(self.rounded(dtype))

    @abc.abstractmethod
    def _rounded(self, dtype: str) -> Iterable[ErrorsByGroup]: ...

    def trace(self, dtype: str, *, is_forward: bool = False) -> ReferenceTrace:
        """The reference's calls in float64, and how far rounding to a dtype moves their arrays.

        With `is_forward`, gradients are not needed.
        """
        raise NotImplementedError(f"{self.name} has no calls")

    @functools.cached_property
    def constants(self) -> Mapping[str, np.ndarray]:
        """The constants of the float64 run, by name."""
        return {}

    @property
    def constant_count(self) -> int:
        """How many numbers of the constants are rounded to float32."""
        return rounded_count(self.constants.values())

    @property
    def constant_names(self) -> Sequence[str]:
        """The names of these constants."""
        return names_of(self.constants)

    def with_constants(self, moves: Sequence[np.ndarray]) -> Results | None:
        """The float64 results where each constant is scaled by 1 + its move; None if unknown."""
        return None
