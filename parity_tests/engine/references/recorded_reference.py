"""A recorded file as the reference."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from parity_tests.engine.candidates.model_weights import ReferenceWeights, WeightsOnly
from parity_tests.engine.logits import LogitsError, logits_array
from parity_tests.engine.problem import Problem
from parity_tests.engine.references.record_file import read, unpacked
from parity_tests.engine.references.reference import Place, Reference, RunErrors
from parity_tests.engine.references.source import Request, Source
from parity_tests.engine.results import ErrorsByGroup, Results
from parity_tests.engine.traces.recorded_trace import recorded_calls
from parity_tests.engine.traces.reference_trace import ReferenceTrace

NO_ACTIVATIONS = "the record has no activations, record it with them"


class Recorded(Reference):
    """A reference that is read from a file."""

    def __init__(
        self,
        facts: Mapping[str, Any],
        oracle: Results,
        problem: Problem,
        trace: Callable[[str], ReferenceTrace],
    ):
        self._facts, self._trace = facts, trace
        self.name, self.seed, self.oracle = facts["name"], facts["seed"], oracle
        self.sides = tuple(facts["sides"])
        self.cast_to, self.notes = facts["cast_to"], facts["notes"]
        self._constants = facts["constants"][bool(problem.constants)]
        logits = logits_array(problem.logits, oracle) if problem.logits else None
        if logits is not None and [*logits] != facts["logits"]:
            raise ValueError(
                f"logits: the record has {(facts['logits'] or ['', 'none'])[1]}, got "
                f"{logits[1]}: record with `logits`"
            )

    def _own_run(self, dtype: str) -> RunErrors:
        run = self._facts["said"][dtype]
        dtypes: dict[Place, Any] = {
            (group, name): np.dtype(each)
            for group, named in run["dtypes"].items()
            for name, each in named.items()
        }
        logits = None if run["logits"] is None else LogitsError(**run["logits"])
        return RunErrors(run["errors"], dtypes, tuple(run["overflows"]), logits)

    def _results_in(self, dtype: str) -> Results:
        raise NotImplementedError("a record has errors, but no results in this dtype")

    def _rounded(self, dtype: str) -> list[ErrorsByGroup]:
        return [self._facts["scatter"][dtype]]

    def trace(self, dtype: str, *, is_forward: bool = False) -> ReferenceTrace:
        """The reference's calls in float64, and how far rounding to a dtype moves their arrays."""
        return self._trace(dtype)

    @property
    def constant_count(self) -> int:
        """How many numbers of the constants are rounded to float32."""
        return self._constants["count"]

    @property
    def constant_names(self) -> Sequence[str]:
        """The names of these constants; an older record has none."""
        return self._constants.get("names", ())


@dataclasses.dataclass(frozen=True)
class RecordSource(Source):
    """A record, which has inputs, dtypes and a seed of its own."""

    path: Path
    facts: Mapping[str, Any]
    inputs: tuple[Any, ...]

    def completed(self, request: Request) -> Request:
        """The record's inputs, dtypes and seed; a request for others is refused."""
        recorded, seed = self.facts["dtypes"], self.facts["seed"]
        if request.inputs and not _same(request.inputs, self.inputs):
            raise ValueError(f"inputs: expected those of {self.path}, or none, got others")
        if request.call_twin is not None:
            raise ValueError("call_twin: a record has the results of its own call, leave it out")
        if request.seed not in (None, seed):
            raise ValueError(f"seed: expected that of the record, {seed}, got {request.seed}")
        dtypes = tuple(recorded) if request.dtypes is None else request.dtypes
        if not {*dtypes} <= {*recorded}:
            raise ValueError(f"dtypes: the record has {', '.join(recorded)}, got {dtypes}")
        return Request(self.inputs, self.facts["has_kwargs"], dtypes, seed, None)


def _same(given: Sequence[Any], recorded: Sequence[Any]) -> bool:
    """True if both are the same tree of the same numbers."""
    ours, theirs = jax.tree.leaves(given), jax.tree.leaves(recorded)
    return jax.tree.structure(given) == jax.tree.structure(recorded) and all(
        type(a) is type(b) and np.array_equal(a, b, equal_nan=isinstance(a, np.ndarray))
        for a, b in zip(ours, theirs, strict=True)
    )


def source_of(path: str | os.PathLike[str]) -> RecordSource:
    """The source that a file of `record` makes."""
    path = Path(path)
    arrays, facts = read(path)
    owners = facts["owners"]
    weights = {key: arrays[f"weights/{owners.get(key, key)}"] for key in facts["keys"]}
    oracle = Results(
        {
            group: {name: arrays[f"results/{group}/{name}"] for name in names}
            for group, names in facts["names"].items()
        }
    )
    oracle.without_gradient = frozenset(map(tuple, facts["without_gradient"]))
    oracle.padding = facts["padding"]
    given = sorted(
        (name for name in arrays if name.startswith("inputs/")),
        key=lambda name: int(name.partition("/")[2]),
    )
    idle = {*facts["idle"]}
    known = ReferenceWeights(
        weights,
        owners,
        facts["parameters"],
        matters=lambda problem, key: owners[key] not in idle,
        is_jax=facts["is_jax"],
    )
    inputs = unpacked(facts["inputs"], [arrays[name] for name in given])

    def trace(dtype: str) -> ReferenceTrace:
        return recorded_calls(facts["calls"], arrays, oracle, owners, dtype)

    return RecordSource(
        WeightsOnly(weights),
        known,
        lambda problem, say: Recorded(facts, oracle, problem, trace),
        submodules=facts.get("submodules"),
        path=path,
        facts=facts,
        inputs=inputs,
        no_calls="" if "calls" in facts else NO_ACTIVATIONS,
    )
