"""Write a reference to a file, for comparisons where torch is not installed."""

import dataclasses
import importlib.metadata
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_models.ops.checks import checked_bool
from parity_tests.engine.candidates.model_weights import ReferenceWeights, is_trivial
from parity_tests.engine.logits import checked_logits, logits_array
from parity_tests.engine.problem import Problem, called
from parity_tests.engine.progress import progress
from parity_tests.engine.references.open_reference import open_reference
from parity_tests.engine.references.record_file import packed, write
from parity_tests.engine.references.reference import Reference, RunErrors
from parity_tests.engine.references.source import requested
from parity_tests.engine.results import Results
from parity_tests.engine.traces.recorded_trace import calls_as_facts
from twinscan.files import check_writable

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
    """Run the reference alone, and write a file for `compare(path, model)`.

    The file has the weights, the inputs, results and gradients in float64, and the reference's own
    error in each dtype. It is written completely or not at all. Comparing with it needs no torch.

    Args:
        twin: a torch module, a `torch.jit.ScriptModule`, or a JAX model, as in `compare`.
        inputs: as in `compare`; flags and arrays, in tuples, lists and dicts.
        path: the file to write, a `.safetensors`.
        call_twin: how to call the twin; by default `twin(*inputs)`.
        kwargs: further inputs, by name.
        dtypes: the dtypes that a comparison may use.
        seed: the seed of the random cotangents.
        logits: as in `compare`; the file then also has the errors of the reference's logits.
        activations: whether to store what each submodule takes and returns in float64, the
            gradients, and how far rounding moves all of these. `compare(path, model, locate=True)`
            needs them. File size, memory and time are then several times as large.

    Raises:
        ValueError: the results are random, or not numbers.
        OSError: the file cannot be written.

    """
    path, activations = Path(path), checked_bool("activations", activations)
    check_writable(path)
    request = requested(inputs, kwargs, dtypes, seed, call_twin)
    arrays: list[np.ndarray] = []
    structure = packed(request.inputs, arrays)
    with jax.enable_x64(True), open_reference(twin) as source, progress("recording") as say:
        start = source.start(request, checked_logits(logits))
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
            told = [reference.trace(dtype) for dtype in problem.dtypes]
            facts["submodules"] = source.submodules and [*source.submodules]
            facts["calls"] = calls_as_facts(told, calls)
    facts |= {"inputs": structure, "has_kwargs": request.has_kwargs}
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


def _facts(problem: Problem, reference: Reference, known: ReferenceWeights) -> dict[str, Any]:
    """What the file holds besides arrays."""
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
        "said": {dtype: _as_json(reference.own_run(dtype)) for dtype in dtypes},
        "scatter": {dtype: reference.scatter(dtype) for dtype in dtypes},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _as_json(errors: RunErrors) -> dict[str, Any]:
    dtypes: dict[str, dict[str, str]] = {}
    for (group, name), dtype in errors.dtypes.items():
        dtypes.setdefault(group, {})[name] = str(dtype)
    return {**dataclasses.asdict(errors), "dtypes": dtypes}


def _of_constants(reference: Reference) -> dict[str, Any]:
    return {
        "count": reference.constant_count,
        "names": reference.constant_names,
    }


def idle_keys(problem: Problem, known: ReferenceWeights, oracle: Results) -> Iterator[str]:
    """The weights on which the result does not depend."""
    gradients = oracle.get("weight gradients", {})
    for key in dict.fromkeys(known.owners.values()):
        moves = key in gradients and bool(np.any(gradients[key]))
        if moves or (key not in known.parameters and not is_trivial(known.arrays[key])):
            continue
        if not known.matters(problem, key):
            yield key
