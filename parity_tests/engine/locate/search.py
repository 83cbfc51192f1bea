"""Finds arrays of the torch side among all arrays that the JAX side computes, whatever their names.

This makes it possible to compare a JAX function without modules with the submodules of a torch
module, and to compare submodules that have no counterpart.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Var

from jax_models.weights.trees import is_floating
from parity_tests.engine.candidates.evaluator import Evaluator
from parity_tests.engine.candidates.jax_program import called_body
from parity_tests.engine.locate.values import closest_error
from parity_tests.engine.problem import Problem
from parity_tests.engine.traces.frameworks import trace_jax
from parity_tests.engine.traces.reference_trace import ReferenceTrace
from parity_tests.engine.traces.trace import Trace


class WatchingEvaluator(Evaluator):
    """Evaluates a program, and passes each of its floating arrays to `tell`.

    These include arrays on which no result depends, such as an output that the caller ignores.
    """

    def __init__(self, tell: Callable[..., None], closed: ClosedJaxpr, *args: Any):
        super().__init__(closed, *args)
        self._tell, self._summands = tell, set()

    def evaluate(self, args: Sequence[Any]) -> list[Any]:
        """The results of the program."""
        self._tell_all(args)
        return super().evaluate(args)

    def _tell_all(self, arrays: Sequence[Any], variables: Sequence[Any] = ()) -> None:
        for x, variable in itertools.zip_longest(arrays, variables):
            is_known = not isinstance(x, Tracer)  # the body of a loop may be compiled
            if is_known and is_floating(x) and x.size:
                self._tell(np.asarray(x), is_summand=variable in self._summands)

    def _run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        # A variable that is only ever added to others is a summand of a gradient, not the gradient.
        uses = [(each.primitive.name == "add_any", each.invars) for each in jaxpr.eqns]
        uses.append((False, jaxpr.outvars))
        summed, used_otherwise = (
            {v for is_sum, atoms in uses if is_sum is of for v in atoms if isinstance(v, Var)}
            for of in (True, False)
        )
        self._summands |= summed - used_otherwise
        return super()._run(jaxpr, consts, args)

    def _equation(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        results = super()._equation(equation, operands)
        if called_body(equation) is None:
            self._tell_all(results, equation.outvars)
        return results


def watch_jax(
    problem: Problem, reference: ReferenceTrace, tell: Callable[..., None], *, is_forward: bool
) -> Trace:
    """Runs the JAX side, and passes its arrays to `tell`. Returns the calls of its modules."""
    results = reference.trace.results
    return trace_jax(
        problem,
        reference.dtype,
        results.forward if is_forward else results,
        reference.cast_to,
        evaluator=partial(WatchingEvaluator, tell),
    )


@dataclasses.dataclass(eq=False)
class WantedArray:
    """An array to look for, and the error of the closest of JAX's arrays so far."""

    array: np.ndarray
    is_total: bool = False
    """True if only the sum of a gradient's summands counts as a match, and no single summand."""
    error: float = np.inf


class Search:
    """Compares JAX's arrays with the wanted ones while JAX computes them, without keeping any.

    A wanted array is found as a whole, up to the order of its axes and repeated slices, or feature
    by feature: JAX may have one array where torch has several, or several where torch has one.
    """

    def __init__(self, wanted: Sequence[WantedArray]):
        self.wanted = wanted
        self._by_size: dict[int, list[tuple[WantedArray, np.ndarray, float]]] = {}
        self._by_rows: dict[int, list[WantedArray]] = {}
        self._features: dict[int, list[tuple[int, np.ndarray]]] = {}
        for each in wanted:
            forms = {array.size: array for array in (each.array, without_repeats(each.array))}
            for form in forms.values():
                norm = float(np.linalg.norm(form))
                self._by_size.setdefault(form.size, []).append((each, form, norm))
            if _row_count(each.array) > 1:
                self._by_rows.setdefault(_row_count(each.array), []).append(each)

    def see(self, value: np.ndarray, *, is_summand: bool = False) -> None:
        """Compares an array of JAX's with all wanted arrays."""
        candidates, rows = self._by_size.get(value.size, ()), _row_count(value)
        if not candidates and rows not in self._by_rows:
            return
        value = np.asarray(value, float)
        with np.errstate(over="ignore"):  # an additive mask may hold its dtype's smallest number
            norm = float(np.linalg.norm(value))
        if not np.isfinite(norm):
            return
        for wanted, form, its_norm in candidates:
            # Two norms differ by at most the norm of the difference, so skip arrays that cannot be
            # closer than the closest one so far.
            if abs(norm - its_norm) < wanted.error * its_norm and not (
                is_summand and wanted.is_total
            ):
                wanted.error = min(wanted.error, closest_error(value, form))
        if rows in self._by_rows and not is_summand:
            self._features.setdefault(rows, []).append((value.shape[-1], _project_features(value)))

    def finish(self) -> None:
        """Looks feature by feature for arrays that were not found as a whole."""
        for rows, seen in self._features.items():
            numbers = np.concatenate([features for _, features in seen])
            widths = np.repeat([width for width, _ in seen], [f.size for _, f in seen])
            order = np.argsort(np.real(numbers))
            for wanted in self._by_rows[rows]:
                # an array with equally many features counts only as a whole: their order matters
                width = wanted.array.shape[-1]
                others = order[widths[order] != width]
                if others.size and width > 1:
                    wanted.error = min(wanted.error, _distance(wanted.array, numbers[others]))


def _distance(array: np.ndarray, numbers: np.ndarray) -> float:
    """The relative distance of an array's projected features from the closest of sorted numbers."""
    features = _project_features(array)
    after = np.searchsorted(np.real(numbers), np.real(features))
    near = [numbers[np.clip(after + i, 0, numbers.size - 1)] for i in (-1, 0)]
    distances = np.min([abs(each - features) for each in near], axis=0)
    return float(np.linalg.norm(distances) / (np.linalg.norm(features) or 1.0))


def _row_count(x: np.ndarray) -> int:
    return int(np.prod(x.shape[:-1])) if x.ndim > 1 else 0


def _project_features(x: np.ndarray) -> np.ndarray:
    """A random projection of each feature to a complex number, which identifies the feature."""
    rng = np.random.default_rng(0)
    real, imaginary = rng.standard_normal((2, _row_count(x))) @ x.reshape(-1, x.shape[-1])
    return real + 1j * imaginary


def without_repeats(x: np.ndarray) -> np.ndarray:
    """The array without the repetitions of equal slices, and of equal halves or pairs of features.

    A rotary embedding's cosines, for example, are equal for all rows and for both halves of a head.
    """
    for axis in range(x.ndim):
        first = x.take([0], axis)
        x = first if (x == first).all() else x
    if x.ndim and x.shape[-1] % 2 == 0:
        middle = x.shape[-1] // 2
        for half, other in ((x[..., :middle], x[..., middle:]), (x[..., ::2], x[..., 1::2])):
            if (half == other).all():
                return half
    return x
