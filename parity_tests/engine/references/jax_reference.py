"""Use a JAX model, which runs on the CPU, as the reference for another JAX model."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

import jax
import numpy as np
from flax import nnx

from parity_tests.engine.bounds.rounded_constants import digits_of, named_by_number
from parity_tests.engine.bounds.tolerance import ROUNDED_RUNS
from parity_tests.engine.candidates.adapters import foreign_model
from parity_tests.engine.candidates.jax_program import first_of
from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.candidates.model_weights import (
    ReferenceWeights,
    WeightsOnly,
    named_table,
    own_weights,
)
from parity_tests.engine.candidates.other_digits import run_with_digits, with_digits
from parity_tests.engine.candidates.port import port
from parity_tests.engine.problem import Problem, all_in_dtype, in_dtype, is_flag
from parity_tests.engine.progress import Say, silent
from parity_tests.engine.references.reference import Reference, ResultKey
from parity_tests.engine.results import (
    ErrorsByGroup,
    Results,
    are_same,
    errors_of,
    named_leaves,
    not_finite,
    only_floating,
)
from parity_tests.engine.traces.frameworks import nnx_modules
from parity_tests.engine.traces.held_weights import find_held_weights
from parity_tests.engine.traces.jax_trace import trace_jax
from parity_tests.engine.traces.reference_trace import ReferenceTrace, trace_of_runs
from parity_tests.engine.traces.trace import Trace

SIDES = ("reference", "model")


class JaxReference(Reference):
    """A model of NNX or another framework, or a function, which runs on the CPU."""

    sides = SIDES

    def __init__(self, model: Any):
        arrays, parameters = own_weights(model)
        first = model[0] if type(model) is tuple else model
        self.name = getattr(first, "__name__", type(first).__name__)
        self.twin, self._model = WeightsOnly(arrays), model
        owners = {key: key for key in arrays}
        self.weights = ReferenceWeights(
            arrays, owners, parameters, self._affects_result, is_jax=True
        )
        if isinstance(model, nnx.Module):
            self.submodules = [path for path, _ in nnx_modules(model)]

    def _as_port(self, problem: Problem) -> Problem:
        """A problem whose JAX side is the reference itself, so that `JaxSide` can run it."""
        fields = ("twin", "call_twin", "inputs", "dtypes", "seed", "logits")
        make_problem = partial(Problem, **{field: getattr(problem, field) for field in fields})
        model, call, weights = self._model, problem.call_twin, self.weights
        if isinstance(model, nnx.Module) or foreign_model(model) is not None:
            ported = port(make_problem, weights, model, named_table(weights.arrays), call)
        else:
            ported = port(make_problem, weights, partial(call, model), None)
        return ported[0]

    def _affects_result(self, problem: Problem, key: str) -> bool:
        own_problem, arrays = self._as_port(problem), self.weights.arrays
        side = JaxSide(own_problem)
        other = np.where(arrays[key] == 0, 1, arrays[key] / 2).astype(arrays[key].dtype)
        shapes, _ = side.shapes(own_problem)
        before, after = (
            side.run(dataclasses.replace(own_problem, twin=WeightsOnly(each)), "float64", shapes)
            for each in (arrays, {**arrays, key: other})
        )
        return not are_same(before, after)

    def run(self, problem: Problem, say: Say = silent) -> Self:
        """Run the model in float64."""
        self._say = say
        try:
            self._run_oracle(self._as_port(problem))
        except TypeError as error:
            if "must be Tensor" in str(error):
                raise TypeError(
                    "twin: expected a function of JAX arrays, but this calls torch: wrap it in a "
                    "torch.nn.Module"
                ) from error
            raise
        return self

    def _run_oracle(self, own_problem: Problem) -> None:
        self.problem, self.notes, parameters = own_problem, [], self.weights.parameters
        self._side, self._moves = JaxSide(own_problem), []
        self._say("reference in float64")
        shapes, found = self._side.shapes(own_problem)
        if any(only_floating(named) for named in shapes.values()):
            shapes["input gradient"] = {
                name: leaf
                for i, tree in enumerate(own_problem.inputs)
                for name, leaf in named_leaves(tree, f"input {i}").items()
                if not is_flag(leaf) and np.issubdtype(leaf.dtype, np.inexact)
            }
            if own_problem.to_torch is not None:
                shapes["weight gradients"] = {
                    key: own_problem.state_dict[key] for key in parameters
                }
        else:
            self.notes = ["gradients are not compared: no output of the reference has one"]
        casts = [cast.partition(" at ")[0].partition(" to ")[2] for cast in found.casts]
        self.cast_to = sorted({*casts})
        self.oracle = self._side.run(own_problem, "float64", shapes, self.cast_to)
        self.faults = not_finite(self.oracle, "float64 reference")
        if found.casts:
            self.notes = [
                *self.notes,
                "reference casts to less than float64: float64 is compared without these casts: "
                f"{first_of(found.casts)}",
            ]

    def _results_in(self, dtype: str) -> Results:
        return self._side.run(self.problem, dtype, self.oracle)

    def _dtypes_in(self, dtype: str, results: Results) -> Mapping[ResultKey, Any]:
        return self._side.facts[dtype].dtypes

    def _rounded(self, dtype: str) -> Iterator[ErrorsByGroup]:
        self._say(f"reference, rounded to {dtype} at random")
        problem = self._problem_rounded_to(dtype)
        side = JaxSide(problem, rounding=dtype)
        run = partial(side.run, problem, "float64", self.oracle, self.cast_to)
        yield from (errors_of(run(noise=seed), self.oracle) for seed in range(ROUNDED_RUNS))

    def _problem_rounded_to(self, dtype: str) -> Problem:
        """The problem with weights and inputs rounded to a dtype."""

        def rounded_array(array: Any) -> Any:
            return array if is_flag(array) else in_dtype(in_dtype(array, dtype), "float64")

        weights = all_in_dtype(all_in_dtype(self.problem.state_dict, dtype), "float64")
        inputs = jax.tree.map(rounded_array, self.problem.inputs)
        return dataclasses.replace(self.problem, twin=WeightsOnly(weights), inputs=inputs)

    @functools.cached_property
    def _float64_trace(self) -> Trace:
        self._say("reference in float64, call by call")
        run = trace_jax(self.problem, "float64", self.oracle, self.cast_to)
        find_held_weights(self.problem, run, self.weights.owners)
        return run

    def trace(self, dtype: str, *, is_forward: bool = False) -> ReferenceTrace:
        """The reference's calls in float64, and how far rounding to a dtype moves their arrays."""
        rounded_problem = self._problem_rounded_to(dtype)

        def rounded() -> Iterator[Trace]:
            run = partial(
                trace_jax, rounded_problem, "float64", self.oracle, self.cast_to, rounding=dtype
            )
            for seed in range(ROUNDED_RUNS):
                yield run(noise=seed)

        def moved() -> Iterator[Trace]:
            if self._moves:  # twice as far as to JAX's digits, so that these are within the bound
                twice = digits_of(self.constants.values(), [2 * move for move in self._moves])
                problem, evaluator = with_digits(self.problem, twice)
                yield trace_jax(problem, "float64", self.oracle, self.cast_to, evaluator=evaluator)

        return trace_of_runs(
            dtype,
            self._float64_trace,
            self.weights.owners,
            lambda: trace_jax(self.problem, dtype, self.oracle),
            rounded(),
            moved(),
        )

    @functools.cached_property
    def constants(self) -> Mapping[str, np.ndarray]:
        """The constants of the model's float64 run, with numbers for names."""
        return named_by_number(self._side.constants_of(self.problem))

    def with_constants(self, moves: Sequence[np.ndarray]) -> Results:
        """The float64 results if each constant is scaled by 1 + its move."""
        self._moves, digits = moves, digits_of(self.constants.values(), moves)
        return run_with_digits(self.problem, digits, self.oracle, self.cast_to)
