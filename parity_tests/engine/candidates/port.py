"""Gives a problem its JAX side: a port of any framework, with the reference's weights."""

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from jax_models.checks.values import described
from parity_tests.engine.candidates.adapters import HeldWeights, foreign_model, foreign_weights
from parity_tests.engine.candidates.function_port import PortedProblem, port_function
from parity_tests.engine.candidates.model_weights import ReferenceWeights, floating_leaves
from parity_tests.engine.candidates.table_port import port_module
from parity_tests.engine.problem import (
    Problem,
    all_in_dtype,
    call_model,
    is_function,
    with_kwargs,
)
from parity_tests.engine.results import only_floating


def port(
    problem: Problem,
    reference: ReferenceWeights,
    model: Any,
    weights: Any,
    call: Any = None,
    *,
    has_kwargs: bool = False,
) -> PortedProblem:
    """The problem with its JAX side, the faults of the weights, and what cannot be compared.

    Args:
        problem: the problem of the reference, whose JAX side is replaced.
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

    # An NNX module is called directly, and a model of another framework is run by its adapter.
    if is_nnx:
        problem = dataclasses.replace(problem, call=apply)
        return port_module(problem, reference, model, weights)
    if foreign is not None:
        run = partial(foreign.run, apply)
        if callable(weights):
            problem = dataclasses.replace(problem, call=run)
            return port_function(
                problem, reference, lambda arrays: foreign.convert_loaded(weights(arrays))
            )
        if foreign.weights is None:
            raise TypeError(
                "model: expected a model with weights, got one without: give it as "
                "(model, weights), or give a loader as `weights`"
            )
        problem = dataclasses.replace(
            problem, call=lambda held, *inputs: run(foreign_weights(held, foreign), *inputs)
        )
        return port_module(problem, reference, HeldWeights(foreign), weights)

    # A function takes the weights that its loader makes, or none if the reference has none.
    if weights is None and not reference.arrays:
        problem = dataclasses.replace(problem, call=lambda _, *inputs: apply(model, *inputs))
        return port_function(problem, reference, dict)
    if not callable(weights) or call is not None:
        raise TypeError(
            "model: a function of weights and inputs needs a loader as `weights`, and no `call`: "
            f"expected a function of a state_dict, as `dict`, got {described(weights)}"
            + (" and `call`" if call is not None else "")
        )
    problem = dataclasses.replace(problem, call=with_kwargs(model) if has_kwargs else model)
    return port_function(problem, reference, weights)


def refuse_other_weights(problem: Problem) -> None:
    """Refuses a model that has less than half of the twin's numbers among its weights."""

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
