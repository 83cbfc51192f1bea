"""A reference in a file: what one side says, for the other to be measured where it is not."""

import dataclasses
import functools
import importlib.metadata
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_models.ops.checks import checked_bool
from parity_tests.engine.known import Known, is_trivial
from parity_tests.engine.locate.recorded import calls_as_facts, calls_of
from parity_tests.engine.locate.reference_trace import ReferenceTrace
from parity_tests.engine.logits import LogitsError, checked_logits, logits_array
from parity_tests.engine.port import called
from parity_tests.engine.problem import Arrays, Problem
from parity_tests.engine.progress import progress
from parity_tests.engine.reference import Place, Reference, Said
from parity_tests.engine.results import ErrorsByGroup, Results
from parity_tests.engine.source import Asked, Source, asked_for, opened
from parity_tests.engine.stored import packed, read, unpacked, write
from twinscan.files import check_writable

NO_ACTIVATIONS = "the record has no activations, record it with them"
PACKAGES = ("twinscan", "torch", "jax", "flax", "numpy")


def record(
    twin: Any,
    *inputs: Any,
    path: str | os.PathLike[str],
    call_twin: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    dtypes: Iterable[str] = ("float64", "float32"),
    seed: int = 0,
    logits: str | bool = False,
    activations: bool = True,
) -> None:
    """Run one side alone, and write what `compare(path, model)` needs of it.

    The file has the weights, the inputs, results and gradients in float64, and how far the side
    errs in each dtype. It is there whole or not at all. Where it is compared, torch is not needed.

    Args:
        twin: a torch module, a `torch.jit.ScriptModule`, or a JAX model, as in `compare`.
        inputs: as in `compare`; flags and arrays, in tuples, lists and dicts.
        path: the file to write, a `.safetensors`.
        call_twin: how it is called; by default `twin(*inputs)`.
        kwargs: further inputs, by name.
        dtypes: those that can be compared in.
        seed: of the cotangents.
        logits: as in `compare`; the record keeps their errors for it.
        activations: what each submodule takes and returns, and the gradients of that, too, in
            float64, and how far rounding carries it: for `compare(path, model, locate=True)`. The
            file, the memory and the time are several times those without.

    Raises:
        ValueError: the results are random, or not numbers.
        OSError: the file cannot be written.

    """
    path, activations = Path(path), checked_bool("activations", activations)
    check_writable(path)
    asked = asked_for(inputs, kwargs, dtypes, seed, call_twin)
    arrays: list[np.ndarray] = []
    structure = packed(asked.inputs, arrays)
    with jax.enable_x64(True), opened(twin) as source, progress("recording") as say:
        start = source.start(asked, checked_logits(logits))
        problem = start(build=dict, call=called, to_torch=None)
        reference = source.reference(problem, say)
        if reference.faults:
            raise ValueError(f"twin: {reference.faults[0]}")
        facts = _facts(problem, reference, source.known)
        buffers = frozenset(source.known.owners) - {*source.known.parameters}
        moving = reference
        if buffers and not source.known.is_jax:
            moving = source.reference(dataclasses.replace(problem, constants=buffers), say)
        facts["constants"] = [_of_constants(each) for each in (reference, moving)]
        calls: dict[str, np.ndarray] = {}
        if activations and not source.no_calls:
            told = [reference.theirs(dtype) for dtype in problem.dtypes]
            facts["submodules"] = source.submodules and [*source.submodules]
            facts["calls"] = calls_as_facts(told, calls)
    facts |= {"inputs": structure, "has_kwargs": asked.has_kwargs}
    owned = {k: a for k, a in source.known.arrays.items() if source.known.owners.get(k, k) == k}
    results = {
        f"{group}/{name}": array
        for group, named in reference.oracle.items()
        for name, array in named.items()
    }
    tensors = {
        **{f"weights/{key}": array for key, array in owned.items()},
        **{f"inputs/{i}": array for i, array in enumerate(arrays)},
        **{f"results/{place}": array for place, array in results.items()},
        **calls,
    }
    write(path, tensors, facts)


def _facts(problem: Problem, reference: Reference, known: Known) -> dict[str, Any]:
    """What the file says beside arrays."""
    oracle = reference.oracle
    dtypes = dict.fromkeys((*problem.dtypes, "float32"))
    return {
        "versions": {name: _version(name) for name in PACKAGES},
        "dtypes": problem.dtypes,
        "seed": problem.seed,
        "name": reference.name,
        "sides": reference.sides,
        "keys": [*known.arrays],
        "owners": known.owners,
        "is_jax": known.is_jax,
        "parameters": [*known.parameters],
        "idle": [*idle_keys(problem, known, oracle)],
        "names": {group: [*named] for group, named in oracle.items()},
        "without_gradient": sorted(oracle.without_gradient),
        "padding": {key: sorted(rows) for key, rows in oracle.padding.items()},
        "cast_to": reference.cast_to,
        "notes": reference.notes,
        "logits": logits_array(problem.logits, oracle) if problem.logits else None,
        "said": {dtype: _said_as_json(reference.said(dtype)) for dtype in dtypes},
        "scatter": {dtype: reference.scatter(dtype) for dtype in dtypes},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _said_as_json(said: Said) -> dict[str, Any]:
    dtypes: dict[str, dict[str, str]] = {}
    for (group, name), dtype in said.dtypes.items():
        dtypes.setdefault(group, {})[name] = str(dtype)
    return {**dataclasses.asdict(said), "dtypes": dtypes}


def _of_constants(reference: Reference) -> dict[str, Any]:
    return {
        "count": reference.constant_count,
        "names": reference.constant_names,
        "scatter": reference.constant_scatter,
    }


def idle_keys(problem: Problem, known: Known, oracle: Results) -> Iterator[str]:
    """The weights on which the result does not depend."""
    gradients = oracle.get("weight gradients", {})
    for key in dict.fromkeys(known.owners.values()):
        moves = key in gradients and bool(np.any(gradients[key]))
        if moves or (key not in known.parameters and not is_trivial(known.arrays[key])):
            continue
        if not known.matters(problem, key):
            yield key


class Recorded(Reference):
    """A reference that is read from a file."""

    def __init__(
        self,
        facts: Mapping[str, Any],
        oracle: Results,
        problem: Problem,
        theirs: Callable[[str], ReferenceTrace],
    ):
        self._facts, self._theirs = facts, theirs
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

    def _said(self, dtype: str) -> Said:
        said = self._facts["said"][dtype]
        dtypes: dict[Place, Any] = {
            (group, name): np.dtype(each)
            for group, named in said["dtypes"].items()
            for name, each in named.items()
        }
        logits = None if said["logits"] is None else LogitsError(**said["logits"])
        return Said(said["errors"], dtypes, tuple(said["overflows"]), logits)

    def _rounded(self, dtype: str) -> list[ErrorsByGroup]:
        return [self._facts["scatter"][dtype]]

    def theirs(self, dtype: str, *, is_forward: bool = False) -> ReferenceTrace:
        """What it records call by call, in float64 and of its rounding in a dtype."""
        return self._theirs(dtype)

    @property
    def constant_count(self) -> int:
        """The numbers that were moved."""
        return self._constants["count"]

    @property
    def constant_names(self) -> Sequence[str]:
        """Their names; an older record has none."""
        return self._constants.get("names", ())

    @functools.cached_property
    def constant_scatter(self) -> ErrorsByGroup:
        """The largest errors of runs whose constants were off by their rounding at random."""
        return self._constants["scatter"]


@dataclasses.dataclass(frozen=True)
class RecordedTwin:
    """The weights of a record."""

    arrays: Arrays

    def state_dict(self) -> Arrays:
        """By key."""
        return self.arrays


@dataclasses.dataclass(frozen=True)
class RecordSource(Source):
    """A record, which has inputs, dtypes and a seed of its own."""

    path: Path
    facts: Mapping[str, Any]
    inputs: tuple[Any, ...]

    def settled(self, asked: Asked) -> Asked:
        """The record's inputs, dtypes and seed, if no others are asked for."""
        recorded, seed = self.facts["dtypes"], self.facts["seed"]
        if asked.inputs and not _same(asked.inputs, self.inputs):
            raise ValueError(f"inputs: expected those of {self.path}, or none, got others")
        if asked.call_twin is not None:
            raise ValueError("call_twin: a record has the results of its own call, leave it out")
        if asked.seed not in (None, seed):
            raise ValueError(f"seed: expected that of the record, {seed}, got {asked.seed}")
        dtypes = tuple(recorded) if asked.dtypes is None else asked.dtypes
        if not {*dtypes} <= {*recorded}:
            raise ValueError(f"dtypes: the record has {', '.join(recorded)}, got {dtypes}")
        return Asked(self.inputs, self.facts["has_kwargs"], dtypes, seed, None)


def _same(given: Sequence[Any], recorded: Sequence[Any]) -> bool:
    """Are they the same trees of the same numbers?"""
    ours, theirs = jax.tree.leaves(given), jax.tree.leaves(recorded)
    return jax.tree.structure(given) == jax.tree.structure(recorded) and all(
        type(a) is type(b) and np.array_equal(a, b, equal_nan=isinstance(a, np.ndarray))
        for a, b in zip(ours, theirs, strict=True)
    )


def source_of(path: str | os.PathLike[str]) -> RecordSource:
    """What a file of `record` has.

    Raises:
        ValueError: it is no such file, or not all of one.
        OSError: it cannot be opened.

    """
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
    known = Known(
        weights,
        owners,
        facts["parameters"],
        matters=lambda problem, key: owners[key] not in idle,
        is_jax=facts["is_jax"],
    )
    inputs = unpacked(facts["inputs"], [arrays[name] for name in given])

    def theirs(dtype: str) -> ReferenceTrace:
        return calls_of(facts["calls"], arrays, oracle, owners, dtype)

    return RecordSource(
        RecordedTwin(weights),
        known,
        lambda problem, say: Recorded(facts, oracle, problem, theirs),
        submodules=facts.get("submodules"),
        path=path,
        facts=facts,
        inputs=inputs,
        no_calls="" if "calls" in facts else NO_ACTIVATIONS,
    )
