"""Adapters that split the model of another framework into weights and a function of them.

There is one adapter for each framework. A framework that has not been imported cannot have made the
model, so this file imports none of them.
"""

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_models.weights.trees import path_of
from parity_tests.engine.problem import is_function, is_inexact

Call = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class ForeignModel:
    """A model of another framework."""

    weights: Any
    """A tree of arrays and of whatever else the model holds; None if it came without weights."""
    run: Callable[..., Any]
    """`run(call, weights, *inputs)` returns `call(model, *inputs)` for a model of these weights."""
    convert_loaded: Callable[[Any], Any] = lambda weights: weights
    """Converts the result of a loader to a tree like `weights`."""
    name_of: Callable[[Any], str] = path_of
    """The name in a weight table of the leaf at a path."""
    is_trained: Callable[[Any], bool] = lambda path: True
    """True if the leaf at a path is a parameter rather than a statistic."""

    def named_arrays(self) -> dict[str, tuple[Any, Any]]:
        """The path and the value of each floating array, by name."""
        leaves = jax.tree_util.tree_leaves_with_path(self.weights)
        floating = [(path, leaf) for path, leaf in leaves if is_inexact(leaf)]
        names = [self.name_of(path) for path, _ in floating]
        if len({*names}) < len(names):
            names = [path_of(path) for path, _ in floating]
        return dict(zip(names, floating, strict=True))


class HeldWeights(nnx.Module):
    """The weights of a model of another framework as an `nnx.Module`, each under its name."""

    def __init__(self, foreign: ForeignModel):
        for name, (path, value) in foreign.named_arrays().items():
            kind = nnx.Param if foreign.is_trained(path) else nnx.BatchStat
            setattr(self, name, kind(jnp.asarray(value)))


HeldWeights.__name__ = "the model"  # in errors, because users do not know this class


def foreign_weights(held: HeldWeights, foreign: ForeignModel) -> Any:
    """The model's tree of weights, with the values that `held` has."""
    values = {
        path: getattr(held, name).get_value() for name, (path, _) in foreign.named_arrays().items()
    }
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: values.get(path, leaf), foreign.weights
    )


def foreign_model(model: Any) -> ForeignModel | None:
    """The model as a `ForeignModel`, if it belongs to another framework than NNX; None otherwise.

    The model may come in a pair with its weights. A pair of a function and its weights counts, too.
    """
    if isinstance(model, nnx.Module | type):
        return None
    parts = model if type(model) is tuple and len(model) == 2 else (model, None)
    for framework, adapter in ADAPTERS.items():
        module = sys.modules.get(framework)
        foreign = None if module is None else adapter(module, *parts)
        if foreign is not None:
            return foreign
    function: Any
    function, weights = parts
    if weights is None or not is_function(function):
        return None
    return ForeignModel(
        weights, lambda call, weights, *inputs: call(partial(function, weights), *inputs)
    )


def _linen(linen: Any, model: Any, variables: Any) -> ForeignModel | None:
    """`module.bind(variables)`, `(module, variables)`, or a module alone if there is a loader."""
    if not isinstance(model, linen.Module):
        return None
    if variables is None and model.scope is not None:
        model, variables = model.unbind()
    if variables is not None and "params" not in variables:
        variables = {"params": variables}

    def convert_loaded(weights: Any) -> Any:
        has_collections = isinstance(weights, Mapping) and "params" in weights
        weights = weights if has_collections else {"params": weights}
        return {**(variables or {}), **weights}

    return ForeignModel(
        None if variables is None else dict(variables),
        lambda call, variables, *inputs: call(model.bind(variables), *inputs),
        convert_loaded,
        name_of=lambda path: path_of(path[1:]),
        is_trained=lambda path: path_of(path[:1]) == "params",
    )


def _equinox(equinox: Any, model: Any, state: Any) -> ForeignModel | None:
    """A module, or `(module, state)` for a module that takes a state and returns the next one."""
    if not isinstance(model, equinox.Module) or isinstance(model, equinox.nn.State):
        return None

    def run(call: Call, weights: Any, *inputs: Any) -> Any:
        if state is None:
            return call(weights, *inputs)
        return call(lambda *arguments: weights(*arguments, state)[0], *inputs)

    return ForeignModel(equinox.nn.inference_mode(model), run, equinox.nn.inference_mode)


def _haiku(haiku: Any, model: Any, params: Any) -> ForeignModel | None:
    """A transformed function, or `(transformed, params)`; with state, `(params, state)`."""
    has_state = isinstance(model, haiku.TransformedWithState)
    if not has_state and not isinstance(model, haiku.Transformed):
        return None
    takes_rng = "rng" in inspect.signature(model.apply).parameters

    def run(call: Call, weights: Any, *inputs: Any) -> Any:
        arguments = (*(weights if has_state else (weights,)), *((None,) if takes_rng else ()))

        def applied(*args, **kwargs):
            result = model.apply(*arguments, *args, **kwargs)
            return result[0] if has_state else result

        return call(applied, *inputs)

    return ForeignModel(
        params,
        run,
        name_of=lambda path: path_of(path[1:] if has_state else path),
        is_trained=lambda path: not has_state or path_of(path[:1]) == "0",
    )


def _keras(keras: Any, model: Any, weights: Any) -> ForeignModel | None:
    """A built layer or model on Keras' JAX backend."""
    if not isinstance(model, keras.Layer) or weights is not None:
        return None
    if keras.backend.backend() != "jax":
        raise TypeError(
            f"model: expected Keras on the backend jax, got {keras.backend.backend()}: set "
            "KERAS_BACKEND=jax before Keras is imported"
        )
    if not model.built:
        raise ValueError("model: expected a built Keras model: call it once, or call its `build`")
    variables = {variable.path: variable for variable in model.variables}
    trained = {variable.path for variable in model.trainable_variables}

    def run(call: Call, values: Any, *inputs: Any) -> Any:
        mapping = [(variables[path], value) for path, value in values.items()]
        with keras.StatelessScope(state_mapping=mapping):
            return call(model, *inputs)

    def convert_loaded(weights: Any) -> Any:
        if isinstance(weights, Mapping):
            return {**own_values, **weights}
        order = [v.path for v in model.weights]
        if len(weights) == len(trained):
            order = [v.path for v in model.trainable_variables]
        return {**own_values, **dict(zip(order, weights, strict=True))}

    own_values = {path: variable.value for path, variable in variables.items()}
    return ForeignModel(
        own_values, run, convert_loaded, is_trained=lambda path: path_of(path) in trained
    )


ADAPTERS = {"flax.linen": _linen, "equinox": _equinox, "haiku": _haiku, "keras": _keras}
