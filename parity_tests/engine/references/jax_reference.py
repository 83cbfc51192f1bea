"""Uses a JAX model, which runs on the CPU, as the reference for another JAX model."""

import dataclasses
import functools
from collections.abc import Mapping
from functools import partial
from typing import Any, Self

import numpy as np
from flax import nnx

from jax_models.weights import same
from parity_tests.engine.bounds.rounded_constants import digits_of, named_by_number
from parity_tests.engine.candidates.adapters import foreign_model
from parity_tests.engine.candidates.jax_program import first_of
from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.candidates.model_weights import ReferenceWeights, WeightsOnly, own_weights
from parity_tests.engine.candidates.port import port
from parity_tests.engine.problem import Arrays, Problem, is_flag, is_inexact
from parity_tests.engine.progress import Say, silent
from parity_tests.engine.references.reference import Reference, ResultKey, Run, Runs
from parity_tests.engine.results import Results, are_same, named_leaves, not_finite, only_floating
from parity_tests.engine.traces.frameworks import nnx_modules, trace_jax
from parity_tests.engine.traces.held_weights import find_held_weights
from parity_tests.engine.traces.trace import Trace


class JaxReference(Reference):
    """A model of NNX or another framework, or a function, which runs on the CPU."""

    sides = ("reference", "model")

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
        model, call, weights = self._model, problem.call_twin, self.weights
        if isinstance(model, nnx.Module) or foreign_model(model) is not None:
            table = [same(name, name) for name in weights.arrays]
            return port(problem, weights, model, table, call)[0]
        return port(problem, weights, partial(call, model), None)[0]

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
        """Runs the model in float64."""
        self.runs = Runs(self, say)
        say("reference in float64")
        try:
            self._run_oracle(self._as_port(problem))
        except TypeError as error:
            if "must be Tensor" in str(error):
                raise TypeError(
                    "twin: expected a function of JAX arrays, got one that calls torch: wrap it "
                    "in a torch.nn.Module"
                ) from error
            raise
        return self

    def _run_oracle(self, problem: Problem) -> None:
        self.problem, self.notes = problem, []
        self._side = functools.cache(partial(JaxSide, problem))
        shapes, found = self._side().shapes(problem)
        if any(only_floating(named) for named in shapes.values()):
            shapes["input gradient"] = {
                name: leaf
                for i, tree in enumerate(problem.inputs)
                for name, leaf in named_leaves(tree, f"input {i}").items()
                if not is_flag(leaf) and is_inexact(leaf)
            }
            if problem.to_torch is not None:
                shapes["weight gradients"] = {
                    key: problem.state_dict[key] for key in self.weights.parameters
                }
        else:
            self.notes.append("gradients are not compared: no output of the reference has one")
        if found.casts:
            self.notes.append(
                "reference casts to less than float64: float64 is compared without these casts: "
                f"{first_of(found.casts)}"
            )
        casts = [cast.partition(" at ")[0].partition(" to ")[2] for cast in found.casts]
        self.cast_to = sorted({*casts})
        self.oracle = self._side().run(problem, "float64", shapes, self.cast_to)
        self.faults = not_finite(self.oracle, "float64 reference")

    def _settings(self, run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
        """The options of `JaxSide`, and the arguments of `JaxSide.run`."""
        options: dict[str, Any] = {} if run.seed is None else {"rounding": run.dtype}
        if run.moves:
            options["digits"] = digits_of(self.constants.values(), run.moves)
        if run.dtype and run.seed is None:
            return options, {"dtype": run.dtype, "oracle": self.oracle}
        exact = {"dtype": "float64", "oracle": self.oracle, "cast_to": self.cast_to}
        return options, {**exact, "noise": run.seed or 0}

    def results(self, run: Run) -> Results:
        options, arguments = self._settings(run)
        return self._side(**options).run(self.problem, **arguments)

    def forward_with(self, weights: Arrays) -> Results:
        """The float64 results of the forward pass if other weights replace some of its own."""
        twin = WeightsOnly({**self.weights.arrays, **weights})
        problem = dataclasses.replace(self.problem, twin=twin)
        return self._side().run(problem, "float64", self.oracle.forward, self.cast_to)

    def trace(self, run: Run, *, is_forward: bool = False) -> Trace:
        options, arguments = self._settings(run)
        if is_forward:
            arguments["oracle"] = self.oracle.forward
        trace = trace_jax(self.problem, **arguments, **options)
        if not run.dtype and not run.moves:
            find_held_weights(self.problem, trace, self.weights.owners)
        return trace

    def dtypes_in(self, dtype: str, results: Results) -> Mapping[ResultKey, Any]:
        return self._side().facts[dtype].dtypes

    @functools.cached_property
    def constants(self) -> Mapping[str, np.ndarray]:
        """The constants of the model's float64 run, with numbers for names."""
        return named_by_number(self._side().constants_of(self.problem))
