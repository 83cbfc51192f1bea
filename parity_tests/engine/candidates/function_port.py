"""Ports a function of weights, which a loader makes from the reference's."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from parity_tests.engine.candidates.model_weights import (
    ReferenceWeights,
    TrackedStateDict,
    checked_weights,
    floating_leaves,
    in_evaluation_mode,
    is_trivial,
    merge,
    model_in_dtype,
    split,
)
from parity_tests.engine.problem import Arrays, Problem, all_in_dtype, in_dtype

PortedProblem = tuple[Problem, list[str], list[str]]
"""A problem, the faults of its weights, and notes on what cannot be compared."""


def port_function(
    problem: Problem, reference: ReferenceWeights, loader: Callable[[Mapping[str, Any]], Any]
) -> PortedProblem:
    """The problem of a function, which `problem.call` calls, with the weights of a loader."""
    # Run the loader once: it must return weights, and read each weight on which the result depends.
    owners, arrays = reference.owners, all_in_dtype(reference.arrays, "float32")
    loaded = loader(reads := TrackedStateDict(arrays))
    if loaded is reads:
        reads.unread.clear()
    else:
        checked_weights(loaded)
    read_owners = {owners[key] for key in owners if key not in reads.unread}
    unread = [key for key in reads.unread if key in owners and owners[key] not in read_owners]
    other_arrays = {key: array for key, array in arrays.items() if key not in owners}

    # If the loader does not read a buffer of computed numbers, such as a sinusoid, JAX must compute
    # them, too, and the outputs show whether they are right. If it does not read a parameter, or a
    # buffer of zeros or ones, the outputs may not show the loss, so ask whether the reference's
    # result depends on it.
    uncertain = [
        key for key in unread if key in reference.parameters or is_trivial(reference.arrays[key])
    ]
    affecting = [key for key in uncertain if reference.affects_result(problem, key)]
    problem = dataclasses.replace(problem, constants=frozenset({*unread} - {*uncertain}))

    def load(arrays: Mapping[str, Any], _: Any) -> Any:
        return in_evaluation_mode(loader({**arrays, **other_arrays}))

    problem, notes = with_loader(problem, owners, arrays, load)
    return problem, [f"weights: the loader does not read {key}" for key in affecting], notes


def with_loader(
    problem: Problem,
    owners: Mapping[str, str],
    arrays: Arrays,
    load: Callable[[Mapping[str, Any], Any], Any],
    rest_in: Callable[[str], Any] = lambda dtype: None,
) -> tuple[Problem, list[str]]:
    """The problem whose model `load` makes, and a note if JAX cannot differentiate through it.

    `load` takes the arrays by key, and the rest of the model, which `rest_in` returns for a dtype.
    Keys with the same owner share one weight, which is differentiated once.
    """

    def by_key(owned: Mapping[str, Any], rest: Any = None) -> dict[str, Any]:
        return {key: owned[owner] for key, owner in owners.items()}

    def build(state_dict: Arrays, dtype: str) -> tuple[Any, Any]:
        keys = dict.fromkeys(owners.values())
        owned = {key: jnp.asarray(in_dtype(state_dict[key], dtype)) for key in keys}
        return owned, rest_in(dtype)

    def load_owned(owned: Any, rest: Any) -> Any:
        return load(by_key(owned), rest)

    def build_eagerly(state_dict: Arrays, dtype: str) -> tuple[Any, Any]:
        loaded = load(all_in_dtype(state_dict, dtype), rest_in(dtype))
        return split(model_in_dtype(checked_weights(loaded), dtype))

    owned, rest = build(arrays, "float32")
    try:
        jax.eval_shape(lambda owned: floating_leaves(split(load_owned(owned, rest))[0]), owned)
    except Exception:  # NumPy and torch raise various errors for traced arrays
        note = "weight gradients are not compared: JAX cannot trace their loading (use jnp, not np)"
        return dataclasses.replace(problem, build=build_eagerly, load=merge, to_torch=None), [note]
    return dataclasses.replace(problem, build=build, load=load_owned, to_torch=by_key), []
