"""Uses a file that `record` wrote as the reference."""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from parity_tests.engine.candidates.model_weights import ReferenceWeights, WeightsOnly
from parity_tests.engine.logits import LogitsError, logits_array
from parity_tests.engine.problem import Arrays, Problem
from parity_tests.engine.progress import Say, silent
from parity_tests.engine.references.record_file import read, unpack
from parity_tests.engine.references.reference import Reference, RunErrors, Runs
from parity_tests.engine.results import ErrorsByGroup, Results
from parity_tests.engine.traces.recorded_trace import recorded_calls
from parity_tests.engine.traces.reference_trace import ReferenceTrace


class RecordedReference(Reference):
    """A reference that `record` wrote to a file, with inputs, dtypes and a seed of its own."""

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)
        self._arrays, self._facts = read(self._path)
        arrays, facts = self._arrays, self._facts
        self.name, self.sides = facts["name"], tuple(facts["sides"])
        self.cast_to, self.notes = facts["cast_to"], facts["notes"]
        self.submodules, self.has_kwargs = facts.get("submodules"), facts["has_kwargs"]
        if "calls" not in facts:
            self.why_no_calls = "the record has no activations, record it with them"

        # A weight that has several keys is stored once.
        owners, keys_without_effect = facts["owners"], {*facts["keys_without_effect"]}
        weights = {key: arrays[f"weights/{owners.get(key, key)}"] for key in facts["keys"]}
        self.twin = WeightsOnly(weights)
        self.weights = ReferenceWeights(
            weights,
            owners,
            facts["parameters"],
            affects_result=lambda problem, key: owners[key] not in keys_without_effect,
            is_jax=facts["is_jax"],
        )
        count = sum(name.startswith("inputs/") for name in arrays)
        self._inputs = unpack(facts["inputs"], [arrays[f"inputs/{i}"] for i in range(count)])
        self.oracle = Results(
            {
                group: {name: arrays[f"results/{group}/{name}"] for name in names}
                for group, names in facts["names"].items()
            }
        )
        self.oracle.without_gradient = frozenset(map(tuple, facts["without_gradient"]))
        self.oracle.padding = facts["padding"]

    def make_problem(
        self,
        inputs: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        dtypes: Iterable[str] | None = None,
        seed: int | None = None,
        call_twin: Any = None,
        logits: str | bool = False,
    ) -> Problem:
        """Checks a user's arguments: inputs, dtypes and seed must be those of the record."""
        recorded, own_seed = self._facts["dtypes"], self._facts["seed"]
        dtypes = recorded if dtypes is None else dtypes
        given = super().make_problem(inputs, kwargs, dtypes, seed, call_twin, logits)
        if given.inputs and not are_same_inputs(given.inputs, self._inputs):
            raise ValueError(f"inputs: expected the inputs of {self._path}, or none, got others")
        if call_twin is not None:
            raise ValueError("call_twin: expected none, because the record has its results")
        if seed not in (None, own_seed):
            raise ValueError(f"seed: expected the seed of the record, {own_seed}, got {seed}")
        if not {*given.dtypes} <= {*recorded}:
            raise ValueError(
                f"dtypes: expected some of {', '.join(recorded)}, which the record has, got "
                f"{', '.join(given.dtypes)}"
            )
        return dataclasses.replace(given, inputs=self._inputs, seed=own_seed)

    def run(self, problem: Problem, say: Say = silent) -> Self:
        """Takes the results from the record, which must have those that the problem asks for."""
        self.problem, constants = problem, self._facts["constants"][bool(problem.constants)]
        self.constant_count = constants["count"]
        self.constant_names, self._moved = constants["names"], constants["moved"]
        self.runs = RecordedRuns(self, self._facts, self._arrays)
        logits = logits_array(problem.logits, self.oracle) if problem.logits else None
        if logits is not None and [*logits] != self._facts["logits"]:
            raise ValueError(
                f"logits: the record has {(self._facts['logits'] or ['', 'none'])[1]}, got "
                f"{logits[1]}: record with `logits`"
            )
        return self

    def moved_results(self, moves: Sequence[np.ndarray], expected: Results) -> ErrorsByGroup:
        """How far the results move if all constants change by as much as their rounding."""
        return self._moved if self.constant_count else {}


class RecordedRuns(Runs):
    """The runs that a record holds."""

    def __init__(self, reference: Reference, facts: Mapping[str, Any], arrays: Arrays):
        super().__init__(reference)
        self._facts, self._arrays = facts, arrays

    def results_in(self, dtype: str) -> Results:
        """The results in float64. Those in other dtypes are not recorded, so there are none."""
        return self._reference.oracle if dtype == "float64" else Results()

    def _own(self, dtype: str) -> RunErrors:
        run = self._facts["own_runs"][dtype]
        dtypes = {
            (group, name): np.dtype(each)
            for group, named in run["dtypes"].items()
            for name, each in named.items()
        }
        logits = None if run["logits"] is None else LogitsError(**run["logits"])
        return RunErrors(run["errors"], dtypes, run["overflows"], logits)

    def _rounded(self, dtype: str) -> list[ErrorsByGroup]:
        return [self._facts["scatter"][dtype]]

    def trace(
        self, dtype: str, *, is_forward: bool = False, moves: Sequence[np.ndarray] = ()
    ) -> ReferenceTrace:
        """The reference's calls in float64, and how far rounding to a dtype moves their arrays."""
        reference = self._reference
        owners, calls = reference.weights.owners, self._facts["calls"]
        return recorded_calls(calls, self._arrays, reference.oracle, owners, dtype)


def are_same_inputs(given: Sequence[Any], recorded: Sequence[Any]) -> bool:
    """True if both have the same tree structure, leaf types and numbers."""
    return jax.tree.structure(given) == jax.tree.structure(recorded) and all(
        type(a) is type(b) and np.array_equal(a, b, equal_nan=isinstance(a, np.ndarray))
        for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(recorded), strict=True)
    )
