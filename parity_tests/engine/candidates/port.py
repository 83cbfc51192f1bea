"""Turn a JAX port of any framework into a problem."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_models import from_torch, to_torch
from jax_models.ops.checks import described
from jax_models.weights.layouts import weight_table
from parity_tests.engine.bounds.tolerance import relative_errors
from parity_tests.engine.candidates.adapters import (
    ForeignModel,
    HeldWeights,
    foreign_model,
    is_floating,
    weights_of,
)
from parity_tests.engine.candidates.model_weights import (
    ReferenceWeights,
    TrackedStateDict,
    checked_loaded,
    evaluating,
    is_trivial,
    named_table,
    own_weights,
    weights_in,
)
from parity_tests.engine.candidates.table_gradients import gradients_by_table
from parity_tests.engine.problem import (
    Arrays,
    Problem,
    all_in_dtype,
    called,
    in_dtype,
    is_torch_module,
    kind_of,
    with_kwargs,
)


def port(
    start: "Start",
    known: ReferenceWeights,
    model: Any,
    weights: Any,
    call: Any = None,
    *,
    has_kwargs: bool = False,
) -> tuple[Problem, list[str], list[str]]:
    """The problem, the faults of the weights, and notes on what cannot be compared.

    With `has_kwargs`, the last input is a dict of inputs by name.
    """
    foreign = foreign_model(model)
    is_function = callable(model) and not isinstance(model, type) and not is_torch_module(model)
    if foreign is None and not isinstance(model, nnx.Module) and not is_function:
        raise TypeError(
            "model: expected an nnx.Module, a model of Linen, Equinox, haiku or Keras, or a "
            f"function of weights, got {kind_of(model)}"
        )
    if isinstance(model, nnx.Module) and any(
        isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(nnx.state(model))
    ):
        raise ValueError("model: expected weights, got a module of nnx.eval_shape, which has none")
    how = with_kwargs(call or called) if has_kwargs else call or called
    if foreign is not None:
        return _of_foreign(start, known, foreign, weights, how)
    if isinstance(model, nnx.Module):
        return _of_module(start, known, model, weights, how)
    function = model
    if weights is None and not known.arrays:
        function, weights = lambda _, *inputs, **kwargs: model(*inputs, **kwargs), dict
    elif not callable(weights) or call is not None:
        raise TypeError(
            "model: a function of weights and inputs needs a loader as `weights`, and no `call`: "
            f"expected a function of a state_dict, as `dict`, got {described(weights)}"
            + (" and `call`" if call is not None else "")
        )
    return _of_loader(start, known, with_kwargs(function) if has_kwargs else function, weights)


Start = Callable[..., Problem]
"""Makes a `Problem` from the fields of its JAX side; the others are filled in."""


def _of_foreign(
    start: Start, known: ReferenceWeights, foreign: ForeignModel, weights: Any, call: Any
) -> tuple[Problem, list[str], list[str]]:
    """A model of another framework, with a loader, a table, or the weights that it has."""
    if callable(weights):
        return _of_loader(
            start,
            known,
            lambda loaded, *inputs: foreign.run(call, loaded, inputs),
            lambda state_dict: foreign.loaded(weights(state_dict)),
        )
    if foreign.weights is None:
        raise TypeError(
            "model: it has no weights: give it with them, as (model, weights), or a loader as "
            "`weights`"
        )
    return _of_module(
        start,
        known,
        HeldWeights(foreign),
        weights,
        lambda held, *inputs: foreign.run(call, weights_of(held, foreign), inputs),
    )


def _of_module(
    start: Start, known: ReferenceWeights, model: nnx.Module, weights: Any, call: Any
) -> tuple[Problem, list[str], list[str]]:
    """A module with a table, or with the weights that it has."""
    if callable(weights):
        raise TypeError(
            "weights: a loader makes the weights itself: give it with a function as `model`, "
            "`lambda weights, *inputs: …`"
        )
    start = partial(start, call=call)
    if weights is None and known.is_jax:
        return _of_named(start, known, model)
    if weights is None and not hasattr(model, "torch_layouts"):
        note = "weight gradients are not compared: `weights` does not say which ones correspond"
        notes = [note] if known.parameters else []
        return start(build=lambda _, dtype: weights_in(model, dtype), to_torch=None), [], notes
    if isinstance(weights, str) and not hasattr(model, "torch_layouts"):
        name = type(model).__name__
        raise TypeError(f"weights: {name} has no layout {weights!r}: give a table (`draft_table`)")
    state_dict = _floating(all_in_dtype(known.arrays, "float64"))
    try:
        _, table = weight_table(model, weights, state_dict)
    except TypeError as error:
        raise TypeError(f"weights: {error}") from None
    except ValueError as error:
        is_own = isinstance(weights, list)
        hint = "; parity_tests.draft_table(twin, model) drafts the missing rows" if is_own else ""
        raise ValueError(f"weights: {error}{hint}") from None

    def build(state_dict: Arrays, dtype: str) -> nnx.Module:
        weights = _floating(all_in_dtype(state_dict, dtype))
        return from_torch(weights_in(model, dtype), weights, table)

    back = to_torch(build(known.arrays, "float64"), table)
    faults = [
        f"weights: {key} comes back changed: the JAX module cannot hold it"
        for row in table
        if row.exact
        for key in row.keys
        if not np.array_equal(back[key], state_dict[key], equal_nan=True)
    ]
    problem = start(
        build=build,
        to_torch=partial(to_torch, layout=table),
        gradient_to_torch=partial(gradients_by_table, table, state_dict, known.owners),
        table=table,
    )
    return problem, faults, []


def _of_named(
    start: Start, known: ReferenceWeights, model: nnx.Module
) -> tuple[Problem, list[str], list[str]]:
    """A module with its own weights, compared with a JAX model by the names of the weights."""
    ours, _ = own_weights(model)
    start = partial(start, build=lambda _, dtype: weights_in(model, dtype))
    if any(key not in ours or ours[key].shape != known.arrays[key].shape for key in known.arrays):
        note = "weight gradients are not compared: the two models' weights have other names"
        return start(to_torch=None), [], [note]
    table = named_table(ours)
    errors = relative_errors(
        all_in_dtype({key: ours[key] for key in known.arrays}, "float64"),
        all_in_dtype(known.arrays, "float64"),
    )
    others = [key for key, error in errors.items() if error]
    notes = []
    if others:
        most = max(others, key=lambda key: errors[key])
        notes = [
            f"{len(others)} of {len(errors)} weights differ, {most} by {errors[most]:.1e}: give "
            "`weights` to compare with the reference's"
        ]
    owners = {name: name for name in ours}
    gradient_to_torch = partial(gradients_by_table, table, ours, owners)
    to_torch_named = partial(to_torch, layout=table)
    return start(to_torch=to_torch_named, gradient_to_torch=gradient_to_torch), [], notes


def _of_loader(
    start: Start, known: ReferenceWeights, model: Callable[..., Any], loader: Any
) -> tuple[Problem, list[str], list[str]]:
    """A function with a loader, through which JAX differentiates if it can trace the loader."""
    owners = known.owners
    reads = TrackedStateDict(all_in_dtype(known.arrays, "float32"))
    loaded = loader(reads)
    if loaded is not reads:
        checked_loaded(loaded)
    unread = () if loaded is reads else reads.unread
    read = {owners[key] for key in owners if key not in unread}
    lost = [key for key in unread if key in owners and owners[key] not in read]
    integers = {key: array for key, array in reads.arrays.items() if key not in owners}

    def load(arrays: Mapping[str, Any]) -> Any:
        return evaluating(loader({**arrays, **integers}))

    try:
        jax.eval_shape(
            lambda arrays: [leaf for leaf in jax.tree.leaves(load(arrays)) if is_floating(leaf)],
            _floating(reads.arrays),
        )
    except Exception:  # NumPy and torch raise various errors for traced arrays
        notes = ["weight gradients are not compared: JAX cannot trace the loader (use jnp, not np)"]

        def build(state_dict: Arrays, dtype: str) -> Any:
            return weights_in(checked_loaded(loader(all_in_dtype(state_dict, dtype))), dtype)

        problem = start(build=build, call=model, to_torch=None)
    else:
        notes = []

        def build_owned(state_dict: Arrays, dtype: str) -> dict[str, jax.Array]:
            return {
                key: jnp.asarray(in_dtype(state_dict[key], dtype))
                for key in dict.fromkeys(owners.values())
            }

        def of_all(owned: dict[str, Any]) -> dict[str, Any]:
            return {key: owned[owner] for key, owner in owners.items()}

        problem = start(
            build=build_owned,
            call=lambda owned, *inputs: model(load(of_all(owned)), *inputs),
            to_torch=lambda gradient: jax.tree.map(np.asarray, of_all(gradient)),
        )
    unseen = [key for key in lost if not _shows(known, key)]
    matter = [key for key in unseen if known.matters(problem, key)]
    problem = dataclasses.replace(problem, constants=frozenset({*lost} - {*unseen}))
    return problem, [f"weights: the loader does not read {key}" for key in matter], notes


def _shows(known: ReferenceWeights, key: str) -> bool:
    """True for a buffer whose numbers JAX can only have by reading or computing them."""
    return key not in known.parameters and not is_trivial(known.arrays[key])


def _floating(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights that a table names. Integers, such as BatchNorm's counter, are not weights."""
    return {key: array for key, array in arrays.items() if is_floating(array)}


def refuse_other_weights(problem: Problem) -> None:
    """Refuse a model that was not given the twin's weights, and does not have them."""

    def numbers(arrays: Iterable[Any]) -> np.ndarray:
        flat = [np.asarray(array).astype(np.complex64).ravel() for array in arrays]
        found = np.unique(np.concatenate([*flat, np.zeros(1, np.complex64)]))
        return found[(found != 0) & (found != 1)]

    theirs = numbers(_floating(all_in_dtype(problem.state_dict, "float32")).values())
    built = problem.build(problem.state_dict, "float32")
    ours = numbers(leaf for leaf in jax.tree.leaves(built) if is_floating(leaf))
    if np.isin(theirs, ours).sum() < theirs.size / 2:
        raise ValueError(
            "weights: the model has other weights than the twin, so nothing can be compared: give "
            "a table or a loader that makes the model's weights from the twin's, as in "
            "weights=[*linear('out', 'fc')] or weights=lambda state_dict: …"
        )
