"""Ports a module whose weights are made by a weight table, or that keeps its own weights."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_models import from_torch, to_torch
from jax_models.weights import Table, Weight, same
from jax_models.weights.layouts import params_of, weight_table
from jax_models.weights.other_params import adopt, other_params
from parity_tests.engine.bounds.tolerance import relative_errors
from parity_tests.engine.candidates.function_port import PortedProblem, with_loader
from parity_tests.engine.candidates.model_weights import (
    ReferenceWeights,
    merge,
    model_in_dtype,
    own_weights,
    split,
)
from parity_tests.engine.problem import Arrays, Problem, all_in_dtype
from parity_tests.engine.results import only_floating


def port_module(
    problem: Problem, reference: ReferenceWeights, model: nnx.Module, weights: Any
) -> PortedProblem:
    """The problem of a module with weights from a table, or with its own weights."""
    if callable(weights):
        raise TypeError(
            "weights: a loader makes the weights itself: give it with a function as `model`, "
            "`lambda weights, *inputs: …`"
        )
    has_layouts = hasattr(model, "torch_layouts")
    if weights is None and (reference.is_jax or not has_layouts):
        return _port_with_own_weights(problem, reference, model)
    if isinstance(weights, str) and not has_layouts:
        name = type(model).__name__
        raise TypeError(f"weights: {name} has no layout {weights!r}: give a table (`draft_table`)")

    # Load the weights: `from_torch` raises an error that lists all keys and shapes that do not fit.
    # Then export them again: a weight that comes back changed is lost in the port.
    state_dict = only_floating(all_in_dtype(reference.arrays, "float64"))
    try:
        _, table = weight_table(model, weights, state_dict, argument=_submodule)
        others = other_params(model, table)
    except TypeError as error:
        raise TypeError(f"weights: {error}") from None
    except ValueError as error:
        is_own = isinstance(weights, list)
        hint = "; parity_tests.draft_table(twin, model) drafts the missing rows" if is_own else ""
        raise ValueError(f"weights: {error}{hint}") from None
    if others:
        model = merge(*split(model))  # the caller's model keeps its parameters
        adopt(model, others)
    back = to_torch(from_torch(model_in_dtype(model, "float64"), state_dict, table), table)
    faults = [
        f"weights: {key} comes back changed: the JAX module cannot hold it"
        for row in table
        if row.exact
        for key in row.keys
        if not np.array_equal(back[key], state_dict[key], equal_nan=True)
    ]
    problem, notes = _with_table(problem, model, table, state_dict, reference.owners)
    return problem, faults, notes


def _submodule(prefix: str) -> str:
    """What to compare instead if the weights are under a prefix."""
    return f'twin.get_submodule("{prefix.removesuffix(".")}") as the twin'


def _port_with_own_weights(
    problem: Problem, reference: ReferenceWeights, model: nnx.Module
) -> PortedProblem:
    """A module with its own weights, which are compared by name if the reference is a JAX model."""
    own = own_weights(model)[0] if reference.is_jax else {}
    fits = all(key in own and own[key].shape == a.shape for key, a in reference.arrays.items())
    if not (reference.is_jax and fits):
        why = "the two models' weights have other names"
        why = why if reference.is_jax else "`weights` does not say which ones correspond"
        notes = [f"weight gradients are not compared: {why}"] if reference.parameters else []
        build = lambda _, dtype: split(model_in_dtype(model, dtype))  # noqa: E731
        return dataclasses.replace(problem, build=build, load=merge, to_torch=None), [], notes
    owners = {name: name for name in own}
    table = [same(name, name) for name in own]
    problem, notes = _with_table(problem, model, table, own, owners)
    errors = relative_errors(
        all_in_dtype({key: own[key] for key in reference.arrays}, "float64"),
        all_in_dtype(reference.arrays, "float64"),
    )
    others = [key for key, error in errors.items() if error]
    if others:
        most = max(others, key=lambda key: errors[key])
        notes += [
            f"{len(others)} of {len(errors)} weights differ, {most} by {errors[most]:.1e}: give "
            "`weights` to compare with the reference's"
        ]
    build_from = problem.build
    build = lambda _, dtype: build_from(own, dtype)  # noqa: E731
    return dataclasses.replace(problem, build=build), [], notes


def _with_table(
    problem: Problem,
    model: nnx.Module,
    table: Table,
    state_dict: Arrays,
    owners: Mapping[str, str],
) -> tuple[Problem, list[str]]:
    """The problem of a module whose weights a table makes, which serves as a loader."""
    used = [row for row in table if row.params]
    rows = [traceable_row(row, [state_dict[key].shape for key in row.keys]) for row in used]
    own, _ = split(model)

    def load(arrays: Mapping[str, Any], rest: Any) -> nnx.Module:
        module = merge(own, rest)
        params = params_of(module)
        for row in rows:
            values = row.to_jax(*(arrays[key] for key in row.keys))
            for path, value in zip(row.params, values, strict=True):
                params[path].set_value(value)
        return module

    def rest_in(dtype: str) -> Any:
        return split(model_in_dtype(model, dtype))[1]

    problem = dataclasses.replace(problem, table=table)
    return with_loader(problem, owners, state_dict, load, rest_in)


def traceable_row(row: Weight, shapes: Sequence[tuple[int, ...]]) -> Weight:
    """The row or, if JAX cannot trace it, an equivalent row that JAX can trace.

    There is an equivalent row only if the row does nothing but move numbers. Otherwise the row is
    returned unchanged.
    """
    with contextlib.suppress(Exception):  # NumPy raises various errors for traced arrays
        jax.eval_shape(row.to_jax, *(jax.ShapeDtypeStruct(shape, float) for shape in shapes))
        return row
    ends = np.cumsum([prod(shape) for shape in shapes])

    def apply_row(numbers: np.ndarray) -> tuple[Any, ...]:
        parts = zip(np.split(numbers, ends[:-1]), shapes, strict=True)
        return row.to_jax(*(part.reshape(shape) for part, shape in parts))

    # Apply the row to the indices of all numbers. If the row only moves numbers, this shows where
    # each number goes; random numbers test whether that is so.
    with contextlib.suppress(Exception):
        places, numbers = apply_row(np.arange(ends[-1])), np.random.default_rng(0).random(ends[-1])
        if all(map(np.array_equal, (numbers[place] for place in places), apply_row(numbers))):
            return row._replace(
                to_jax=lambda *arrays: tuple(
                    jnp.concatenate([array.ravel() for array in arrays])[place] for place in places
                )
            )
    return row
