"""The interface of a reference: the side against which a JAX side is measured."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np

from jax_models.checks.values import checked_bool, checked_count, described
from parity_tests.engine.bounds.rounded_constants import are_moved, names_of, rounded_count
from parity_tests.engine.bounds.tolerance import ROUNDED_RUNS
from parity_tests.engine.candidates.model_weights import ReferenceWeights
from parity_tests.engine.logits import LogitsError, checked_logits, logits_array, logits_error
from parity_tests.engine.problem import (
    DTYPES,
    Arrays,
    Problem,
    call_model,
    check_functions,
    checked_arrays,
    checked_dtypes,
    with_kwargs,
)
from parity_tests.engine.progress import Say, silent
from parity_tests.engine.results import (
    ErrorsByGroup,
    Results,
    errors_of,
    largest_by_group,
    not_finite,
    replayable,
)
from parity_tests.engine.traces.reference_trace import (
    ReferenceTrace,
    RunAgain,
    TraceWith,
    errors_at,
    own_run,
)
from parity_tests.engine.traces.trace import Trace

ResultKey = tuple[str, str]
"""The group and the name of a result, such as ("outputs", "y")."""


@dataclasses.dataclass(frozen=True)
class RunErrors:
    """The errors and dtypes of the reference's own run in a dtype."""

    errors: ErrorsByGroup
    """The errors relative to the reference in float64."""
    dtypes: Mapping[ResultKey, Any]
    """The dtypes of its results."""
    overflows: Sequence[str] = ()
    """Why nothing can be compared in this dtype: numbers that overflow, for example."""
    logits: LogitsError | None = None


class Run(NamedTuple):
    """The options of a reference's run, which by default is in float64 and ignores its casts."""

    dtype: str = ""
    """The dtype of the run, with the reference's own casts."""
    seed: int | None = None
    """The seed of a float64 run that is rounded to `dtype` at random instead."""
    moves: Sequence[np.ndarray] = ()
    """The relative change of each constant; by default, none is changed."""


class Reference(abc.ABC):
    """A torch module, a record of one, or a JAX model, against which a JAX side is measured.

    `open_reference` opens it, `make_problem` checks the inputs, and `run` runs it in float64 once
    the JAX side is known. `runs` has what is known from its other runs.
    """

    # Known as soon as the reference is open.
    name: str
    """The name of the reference's class."""
    sides: tuple[str, str] = ("torch", "JAX")
    """The names of the reference and of the JAX side in reports."""
    twin: Any
    """The problem's `twin`: the torch module, or an object that holds only the weights."""
    weights: ReferenceWeights
    submodules: Collection[str] | None = None
    """The names of its submodules, with "" for the module itself; None if unknown."""
    why_no_calls = ""
    """Why its submodules cannot be compared one by one; empty if they can."""
    has_kwargs = False
    """True if the reference brings its own inputs and the last one is a dict of inputs by name."""

    # Known after `run`.
    problem: Problem
    oracle: Results
    """The results in float64. The reference's own casts to coarser dtypes are ignored."""
    cast_to: Sequence[str] = ()
    """The dtypes that the reference casts to, as JAX names them."""
    faults: Sequence[str] = ()
    """Why nothing can be compared; empty if everything can."""
    notes: Sequence[str] = ()
    """Remarks on the limits of the comparison, for the report."""
    runs: Runs
    run_again: RunAgain | None = None
    trace_with: TraceWith | None = None

    def make_problem(
        self,
        inputs: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        dtypes: Iterable[str] | None = None,
        seed: int | None = None,
        call_twin: Callable[..., Any] | None = None,
        logits: str | bool = False,
    ) -> Problem:
        """Checks a user's arguments, and makes the problem, still without a JAX side.

        The reference chooses a value for each argument that is None.
        """
        check_functions({}, {"call_twin": call_twin})
        inputs = checked_arrays("inputs", inputs, flags=True)
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise TypeError(f"kwargs: expected a dict of inputs by name, got {described(kwargs)}")
        call = call_twin or call_model
        if kwargs:
            inputs = (*inputs, checked_arrays("kwargs", dict(kwargs), flags=True))
            call = with_kwargs(call)
        return Problem(
            twin=self.twin,
            call_twin=call,
            inputs=inputs,
            dtypes=DTYPES[:2] if dtypes is None else checked_dtypes(dtypes),
            seed=0 if seed is None else checked_count("seed", seed),
            logits=checked_logits(logits),
        )

    def checked_locate(self, locate: bool | None, names: Any) -> bool:
        """Whether to locate a failure; None means True if submodules can be compared."""
        is_chosen = locate is not None and checked_bool("locate", locate)
        if (is_chosen or names) and self.why_no_calls:
            raise ValueError(f"locate: {self.why_no_calls}")
        return is_chosen if locate is not None else not self.why_no_calls

    @abc.abstractmethod
    def run(self, problem: Problem, say: Say = silent) -> Self:
        """Runs the problem in float64, and keeps the results as the oracle."""

    def results(self, run: Run) -> Results:
        """The results of a run."""
        raise NotImplementedError(f"{self.name} cannot run again")

    def trace(self, run: Run, *, is_forward: bool = False) -> Trace:
        """The calls of a run; with `is_forward`, those of the forward pass."""
        raise NotImplementedError(f"{self.name} cannot run again")

    def dtypes_in(self, dtype: str, results: Results) -> Mapping[ResultKey, Any]:
        """The dtypes of the results of a run in a dtype, with the reference's own casts."""
        raise NotImplementedError(f"{self.name} has no results in {dtype}")

    def forward_with(self, weights: Arrays) -> Results:
        """The float64 results of the forward pass if other weights replace some of its own.

        Empty if the reference cannot run again, as a record cannot.
        """
        return Results()

    @functools.cached_property
    def constants(self) -> Mapping[str, np.ndarray]:
        """The constants of the float64 run, by name."""
        return {}

    @functools.cached_property
    def constant_count(self) -> int:
        """The number of entries of the constants that are rounded to float32."""
        return rounded_count(self.constants.values())

    @functools.cached_property
    def constant_names(self) -> Sequence[str]:
        """The names of these constants."""
        return names_of(self.constants)

    def with_constants(self, moves: Sequence[np.ndarray]) -> Results:
        """The float64 results if each constant is scaled by 1 + its move."""
        return self.results(Run(moves=moves))

    def with_other_arguments(self) -> Iterable[tuple[str, Results]]:
        """The float64 results with other arguments of the functions, and which arguments they are.

        Only a torch module can run with other arguments.
        """
        return ()

    def moved_results(self, moves: Sequence[np.ndarray], expected: Results) -> ErrorsByGroup:
        """How far the results move from the expected ones if the constants change by these moves.

        No result moves if no constant does.
        """
        return errors_of(self.with_constants(moves), expected) if are_moved(moves) else {}


class Runs:
    """The runs of a reference other than its float64 run, each made when it is first needed."""

    def __init__(self, reference: Reference, say: Say = silent):
        self._reference, self._say = reference, say
        self.own = functools.cache(self._own)
        """The errors of the reference's own run in a dtype."""
        self._rounded_runs = functools.cache(lambda dtype: replayable(self._rounded(dtype)))
        self._exact_trace = functools.cache(partial(reference.trace, Run()))

    def results_in(self, dtype: str) -> Results:
        """The results of the reference's own run in a dtype."""
        reference = self._reference
        return reference.oracle if dtype == "float64" else reference.results(Run(dtype))

    def _own(self, dtype: str) -> RunErrors:
        reference = self._reference
        side, oracle, logits = reference.sides[0], reference.oracle, reference.problem.logits
        self._say(f"{side} in {dtype}")
        results = self.results_in(dtype)
        error = None
        if logits:
            group, name = logits_array(logits, oracle)
            error = logits_error(results[group][name], oracle[group][name])
        return RunErrors(
            errors_of(results, oracle),
            reference.dtypes_in(dtype, results),
            not_finite(results, f"{dtype} {side}", oracle),
            error,
        )

    def rounded(self, dtype: str) -> Iterator[ErrorsByGroup]:
        """The errors of float64 runs whose operations are rounded to a dtype at random."""
        return self._rounded_runs(dtype)()

    def scatter(self, dtype: str) -> ErrorsByGroup:
        """The largest error of each result in the runs with random rounding to a dtype."""
        return largest_by_group(self.rounded(dtype))

    def _rounded(self, dtype: str) -> Iterable[ErrorsByGroup]:
        self._say(f"{self._reference.sides[0]}, rounded to {dtype} at random")
        for seed in range(ROUNDED_RUNS):
            yield errors_of(self._reference.results(Run(dtype, seed)), self._reference.oracle)

    def trace(
        self, dtype: str, *, is_forward: bool = False, moves: Sequence[np.ndarray] = ()
    ) -> ReferenceTrace:
        """The reference's calls in float64, and how far rounding to a dtype moves their arrays.

        With `is_forward`, gradients are not needed. `moves` are the relative changes of the
        constants whose effects are within the bounds of float64; by default, there are none.
        """
        reference = self._reference
        self._say(f"{reference.sides[0]} in float64, call by call")
        exact = self._exact_trace(is_forward=is_forward)
        trace = partial(reference.trace, is_forward=is_forward)
        rounded = [Run(dtype, seed) for seed in range(ROUNDED_RUNS)]
        # JAX's digits move the arrays as far as `moves` does, up to rounding. Twice that distance
        # is a bound with some room.
        moved = [Run(moves=[2 * move for move in moves])] if are_moved(moves) else []
        rounded_errors, moved_errors = (
            replayable(errors_at(trace(run), exact) for run in runs) for runs in (rounded, moved)
        )
        return ReferenceTrace(
            dtype,
            exact,
            reference.weights.owners,
            functools.cache(lambda: own_run(trace(Run(dtype)), exact)),
            rounded_errors,
            moved_errors,
            reference.run_again,
            reference.trace_with,
        )
