"""Writes a reference to a file, for comparisons where torch is not installed."""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_models.checks.values import checked_bool
from parity_tests.engine.bounds.rounded_constants import is_rounded, moved_by_rounding
from parity_tests.engine.candidates.model_weights import is_trivial
from parity_tests.engine.logits import logits_array
from parity_tests.engine.problem import Arrays
from parity_tests.engine.progress import progress
from parity_tests.engine.references.open_reference import open_reference
from parity_tests.engine.references.record_file import pack, write
from parity_tests.engine.references.recorded_reference import RecordedReference
from parity_tests.engine.references.reference import Reference, RunErrors
from parity_tests.engine.traces.recorded_trace import calls_as_facts
from twinscan.files import check_writable


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
    """Runs the reference alone, and writes a file for `compare(path, model)`.

    The file contains the weights, the inputs, the results and gradients in float64, and the
    reference's own error in each dtype. It is written completely or not at all. A comparison with
    the file does not need torch.

    Args:
        twin: a torch module, a `torch.jit.ScriptModule`, or a JAX model, as in `compare`.
        inputs: as in `compare`; flags and arrays, in tuples, lists and dicts.
        path: the file to write, a `.safetensors`.
        call_twin: how to call the twin; by default `twin(*inputs)`.
        kwargs: further inputs, by name.
        dtypes: the dtypes that a comparison may use.
        seed: the seed of the random cotangents.
        logits: as in `compare`; the file then also has the errors of the reference's logits.
        activations: whether to store the inputs, outputs and gradients of each submodule in
            float64, and how far rounding moves them. `compare(path, model, locate=True)` needs
            these. File size, memory and time are then several times as large.

    Raises:
        ValueError: the results are random or contain NaN.
        OSError: the file cannot be written.

    """
    # Check the arguments, run the reference in float64, and collect its own errors.
    path, activations = Path(path), checked_bool("activations", activations)
    check_writable(path)
    with jax.enable_x64(True), open_reference(twin) as reference, progress("recording") as say:
        if isinstance(reference, RecordedReference):
            raise TypeError(
                "twin: expected a torch module or a JAX model, got the path of a record"
            )
        problem = reference.make_problem(inputs, kwargs, dtypes, seed, call_twin, logits)
        arrays: list[np.ndarray] = []
        structure = pack(problem.inputs, arrays)
        reference.run(problem, say)
        if reference.faults:
            raise ValueError(f"twin: {reference.faults[0]}")
        facts = facts_of(reference) | {"inputs": structure, "has_kwargs": bool(kwargs)}

        # A port may compute the numbers of buffers itself. `with_buffers` is the same reference if
        # all buffers count as constants.
        weights, with_buffers = reference.weights, reference
        buffers = frozenset(weights.owners) - {*weights.parameters}
        if buffers and not weights.is_jax:
            with open_reference(twin) as with_buffers:
                with_buffers.run(dataclasses.replace(problem, constants=buffers), say)
        facts["constants"] = [constants_as_facts(each) for each in (reference, with_buffers)]
        calls: Arrays = {}
        if activations:
            moves = moves_by_rounding(reference)
            traces = [reference.runs.trace(dtype, moves=moves) for dtype in problem.dtypes]
            facts["submodules"] = reference.submodules and [*reference.submodules]
            facts["calls"] = calls_as_facts(traces, calls)

    # Weights that share an array are stored once, as all equal arrays are.
    tensors = {
        **{f"weights/{key}": array for key, array in weights.arrays.items()},
        **{f"inputs/{i}": array for i, array in enumerate(arrays)},
        **{
            f"results/{group}/{name}": array
            for group, named in reference.oracle.items()
            for name, array in named.items()
        },
        **calls,
    }
    write(path, tensors, facts)


def facts_of(reference: Reference) -> dict[str, Any]:
    """The facts about a reference that the file stores, besides its arrays, inputs and calls."""
    problem, oracle, weights = reference.problem, reference.oracle, reference.weights
    dtypes = dict.fromkeys((*problem.dtypes, "float32"))
    return {
        "dtypes": problem.dtypes,
        "seed": problem.seed,
        "name": reference.name,
        "sides": reference.sides,
        "keys": [*weights.arrays],
        "owners": weights.owners,
        "is_jax": weights.is_jax,
        "parameters": [*weights.parameters],
        "keys_without_effect": [*keys_without_effect(reference)],
        "names": {group: [*named] for group, named in oracle.items()},
        "without_gradient": sorted(oracle.without_gradient),
        "padding": {key: sorted(rows) for key, rows in oracle.padding.items()},
        "cast_to": reference.cast_to,
        "notes": reference.notes,
        "logits": logits_array(problem.logits, oracle) if problem.logits else None,
        "own_runs": {dtype: errors_as_facts(reference.runs.own(dtype)) for dtype in dtypes},
        "scatter": {dtype: reference.runs.scatter(dtype) for dtype in dtypes},
    }


def errors_as_facts(errors: RunErrors) -> dict[str, Any]:
    """The errors of a run as JSON, in which all keys are strings."""
    dtypes: dict[str, dict[str, str]] = {}
    for (group, name), dtype in errors.dtypes.items():
        dtypes.setdefault(group, {})[name] = str(dtype)
    return {**dataclasses.asdict(errors), "dtypes": dtypes}


def moves_by_rounding(reference: Reference) -> list[np.ndarray]:
    """Relative changes of all rounded constants by as much as their rounding."""
    return moved_by_rounding(map(is_rounded, reference.constants.values()))


def constants_as_facts(reference: Reference) -> dict[str, Any]:
    """The number of rounded constants, their names, and how far the results depend on them."""
    return {
        "count": reference.constant_count,
        "names": reference.constant_names,
        "moved": reference.moved_results(moves_by_rounding(reference), reference.oracle),
    }


def keys_without_effect(reference: Reference) -> Iterator[str]:
    """The keys of weights on which the result does not depend."""
    weights, gradients = reference.weights, reference.oracle.get("weight gradients", {})
    for key in dict.fromkeys(weights.owners.values()):
        moves = key in gradients and bool(np.any(gradients[key]))
        if moves or (key not in weights.parameters and not is_trivial(weights.arrays[key])):
            continue
        if not weights.affects_result(reference.problem, key):
            yield key
