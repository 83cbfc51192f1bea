"""Make a problem from a JAX port of any framework."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_models import from_torch, to_torch
from jax_models.ops.checks import described
from jax_models.weights import Table, Weight, same
from jax_models.weights.layouts import params_of, weight_table
from jax_models.weights.other_params import adopt, other_params
from parity_tests.engine.bounds.tolerance import relative_errors
from parity_tests.engine.candidates.adapters import HeldWeights, foreign_model, foreign_weights
from parity_tests.engine.candidates.model_weights import (
    ReferenceWeights,
    TrackedStateDict,
    checked_weights,
    in_evaluation_mode,
    is_trivial,
    merge,
    model_in_dtype,
    own_weights,
    split,
)
from parity_tests.engine.problem import (
    Arrays,
    Problem,
    all_in_dtype,
    call_model,
    in_dtype,
    is_function,
    is_inexact,
    with_kwargs,
)
from parity_tests.engine.results import only_floating

MakeProblem = Callable[..., Problem]
"""Makes a `Problem` from the fields of its JAX side; the other fields are already filled in."""
PortedProblem = tuple[Problem, list[str], list[str]]
"""A problem, the faults of its weights, and notes on what cannot be compared."""


def port(
    make: MakeProblem,
    reference: ReferenceWeights,
    model: Any,
    weights: Any,
    call: Any = None,
    *,
    has_kwargs: bool = False,
) -> PortedProblem:
    """The problem of a port, the faults of its weights, and notes on what cannot be compared.

    Args:
        make: makes the problem from the fields of its JAX side.
        reference: the reference's weights.
        model: the JAX model.
        weights: a weight table, the name of a layout, or a loader, as in `compare`.
        call: how to call the model; by default `model(*inputs)`.
        has_kwargs: whether the last input is a dict of inputs by name.

    """
    # Refuse a model of an unknown kind, or without numbers.
    foreign, is_nnx = foreign_model(model), isinstance(model, nnx.Module)
    if foreign is None and not is_nnx and not is_function(model):
        raise TypeError(
            "model: expected an nnx.Module, a model of Linen, Equinox, haiku or Keras, or a "
            f"function of weights, got {described(model)}"
        )
    if is_nnx and any(
        isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(nnx.state(model))
    ):
        raise ValueError("model: expected weights, got a module of nnx.eval_shape, which has none")
    apply = with_kwargs(call or call_model) if has_kwargs else call or call_model

    # A model of another framework is run by its adapter; an NNX module is called directly.
    if foreign is not None:
        run = partial(foreign.run, apply)
        if callable(weights):
            return _port_function(
                make, reference, run, lambda arrays: foreign.convert_loaded(weights(arrays))
            )
        if foreign.weights is None:
            raise TypeError(
                "model: it has no weights: give it with them, as (model, weights), or a loader as "
                "`weights`"
            )
        make = partial(
            make, call=lambda held, *inputs: run(foreign_weights(held, foreign), *inputs)
        )
        return _port_module(make, reference, HeldWeights(foreign), weights)
    if is_nnx:
        return _port_module(partial(make, call=apply), reference, model, weights)

    # A function takes the weights that its loader makes, or none if the reference has none.
    if weights is None and not reference.arrays:
        return _port_function(make, reference, lambda _, *inputs: apply(model, *inputs), dict)
    if not callable(weights) or call is not None:
        raise TypeError(
            "model: a function of weights and inputs needs a loader as `weights`, and no `call`: "
            f"expected a function of a state_dict, as `dict`, got {described(weights)}"
            + (" and `call`" if call is not None else "")
        )
    return _port_function(make, reference, with_kwargs(model) if has_kwargs else model, weights)


def _port_module(
    make: MakeProblem, reference: ReferenceWeights, model: nnx.Module, weights: Any
) -> PortedProblem:
    """A module with weights from a table, or with its own weights."""
    if callable(weights):
        raise TypeError(
            "weights: a loader makes the weights itself: give it with a function as `model`, "
            "`lambda weights, *inputs: …`"
        )
    has_layouts = hasattr(model, "torch_layouts")
    if weights is None and (reference.is_jax or not has_layouts):
        return _port_with_own_weights(make, reference, model)
    if isinstance(weights, str) and not has_layouts:
        name = type(model).__name__
        raise TypeError(f"weights: {name} has no layout {weights!r}: give a table (`draft_table`)")

    # Load the weights: `from_torch` raises an error that lists all keys and shapes that do not fit.
    # Then export them again: a weight that comes back changed is lost in the port.
    state_dict = only_floating(all_in_dtype(reference.arrays, "float64"))
    try:
        _, table = weight_table(model, weights, state_dict)
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
    problem, notes = _port_with_table(make, model, table, state_dict, reference.owners)
    return problem, faults, notes


def _port_with_own_weights(
    make: MakeProblem, reference: ReferenceWeights, model: nnx.Module
) -> PortedProblem:
    """A module with its own weights, which are compared by name if the reference is a JAX model."""
    own = own_weights(model)[0] if reference.is_jax else {}
    fits = all(key in own and own[key].shape == a.shape for key, a in reference.arrays.items())
    if not (reference.is_jax and fits):
        why = "the two models' weights have other names"
        why = why if reference.is_jax else "`weights` does not say which ones correspond"
        notes = [f"weight gradients are not compared: {why}"] if reference.parameters else []
        build = lambda _, dtype: split(model_in_dtype(model, dtype))  # noqa: E731
        return make(build=build, load=merge, to_torch=None), [], notes
    owners = {name: name for name in own}
    problem, notes = _port_with_table(make, model, [same(name, name) for name in own], own, owners)
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
    of_state_dict = problem.build
    build = lambda _, dtype: of_state_dict(own, dtype)  # noqa: E731
    return dataclasses.replace(problem, build=build), [], notes


def _port_with_table(
    make: MakeProblem,
    model: nnx.Module,
    table: Table,
    state_dict: Arrays,
    owners: Mapping[str, str],
) -> tuple[Problem, list[str]]:
    """A module whose weights are made by a weight table, which serves as a loader."""
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

    return _differentiable_problem(
        partial(make, table=table),
        owners,
        state_dict,
        load,
        lambda dtype: split(model_in_dtype(model, dtype))[1],
    )


def _port_function(
    make: MakeProblem, reference: ReferenceWeights, model: Callable[..., Any], loader: Any
) -> PortedProblem:
    """A function whose weights are made by a loader."""
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

    def load(arrays: Mapping[str, Any], _: Any) -> Any:
        return in_evaluation_mode(loader({**arrays, **other_arrays}))

    make = partial(make, call=model)
    problem, notes = _differentiable_problem(make, owners, arrays, load, lambda dtype: None)

    # If the loader does not read a buffer of computed numbers, such as a sinusoid, JAX must compute
    # them, too, and the outputs show whether they are right. If it does not read a parameter, or a
    # buffer of zeros or ones, the outputs may not show the loss, so ask whether the reference's
    # result depends on it.
    uncertain = [
        key for key in unread if key in reference.parameters or is_trivial(reference.arrays[key])
    ]
    affecting = [key for key in uncertain if reference.affects_result(problem, key)]
    problem = dataclasses.replace(problem, constants=frozenset({*unread} - {*uncertain}))
    return problem, [f"weights: the loader does not read {key}" for key in affecting], notes


def _differentiable_problem(
    make: MakeProblem,
    owners: Mapping[str, str],
    arrays: Arrays,
    load: Callable[[Mapping[str, Any], Any], Any],
    rest_in: Callable[[str], Any],
) -> tuple[Problem, list[str]]:
    """A problem whose model `load` makes. JAX differentiates through `load` if it can trace it.

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

    owned, rest = build(arrays, "float32")
    try:
        jax.eval_shape(lambda owned: floating_leaves(split(load_owned(owned, rest))[0]), owned)
    except Exception:  # NumPy and torch raise various errors for traced arrays
        note = "weight gradients are not compared: JAX cannot trace their loading (use jnp, not np)"

        def build_eagerly(state_dict: Arrays, dtype: str) -> tuple[Any, Any]:
            loaded = load(all_in_dtype(state_dict, dtype), rest_in(dtype))
            return split(model_in_dtype(checked_weights(loaded), dtype))

        return make(build=build_eagerly, load=merge, to_torch=None), [note]
    return make(build=build, load=load_owned, to_torch=by_key), []


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


def floating_leaves(tree: Any) -> list[Any]:
    """The arrays of real or complex numbers in a tree."""
    return [*filter(is_inexact, jax.tree.leaves(tree))]


def refuse_other_weights(problem: Problem) -> None:
    """Refuse a model that has less than half of the twin's numbers among its weights."""

    def numbers(arrays: Iterable[Any]) -> np.ndarray:
        flat = [np.asarray(array).astype(np.complex64).ravel() for array in arrays]
        found = np.unique(np.concatenate([*flat, np.zeros(1, np.complex64)]))
        return found[(found != 0) & (found != 1)]

    expected = numbers(only_floating(all_in_dtype(problem.state_dict, "float32")).values())
    built = floating_leaves(problem.build(problem.state_dict, "float32"))
    if np.isin(expected, numbers(built)).sum() < expected.size / 2:
        raise ValueError(
            "weights: the model has other weights than the twin, so nothing can be compared: give "
            "a table or a loader that makes the model's weights from the twin's, as in "
            "weights=[*linear('out', 'fc')] or weights=lambda state_dict: … (draft_table of "
            "parity_tests drafts a table)"
        )
