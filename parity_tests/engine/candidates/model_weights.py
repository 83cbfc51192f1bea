"""The weights of a reference, of a JAX model, and of a loader."""

import dataclasses
from collections import UserDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_models.weights.layouts import WEIGHTS, params_of
from jax_models.weights.stored import as_numpy
from parity_tests.engine.candidates.adapters import HeldWeights, foreign_model
from parity_tests.engine.problem import (
    Arrays,
    Problem,
    checked_arrays,
    in_dtype,
    is_inexact,
    is_list_of_numbers,
)


@dataclasses.dataclass(frozen=True)
class ReferenceWeights:
    """The reference's weights, with which a port is compared."""

    arrays: Arrays
    """The weights by key, in their own dtypes."""
    owners: Mapping[str, str]
    """For each key of a floating weight, the first of the keys that share this weight."""
    parameters: Collection[str]
    """The keys of parameters, which torch would train, without buffers."""
    affects_result: Callable[[Problem, str], bool]
    """`affects_result(problem, key)` is True if the result depends on the weight with this key."""
    is_jax: bool = False
    """Whether the weights belong to a JAX model, under its own names."""


def own_weights(model: Any) -> tuple[Arrays, list[str]]:
    """The weights of a JAX model, by path, and the paths of those that are trained."""
    foreign = foreign_model(model)
    if foreign is not None and foreign.weights is None:
        raise TypeError(
            "twin: expected a model with weights, got one without: give it as (model, weights)"
        )
    model = model if foreign is None else HeldWeights(foreign)
    if not isinstance(model, nnx.Module):
        return {}, []
    params = params_of(model)
    arrays = {path: np.asarray(param.get_value()) for path, param in params.items()}
    return arrays, [path for path, param in params.items() if isinstance(param, nnx.Param)]


def is_trivial(value: np.ndarray) -> bool:
    """True if the array is all zeros or all ones."""
    return bool((value == 0).all() or (value == 1).all())


@dataclasses.dataclass(frozen=True)
class WeightsOnly:
    """Weights that replace the torch module in a `Problem`."""

    arrays: Arrays

    def state_dict(self) -> Arrays:
        """The weights by key."""
        return self.arrays


def in_evaluation_mode(weights: Any) -> Any:
    """The weights; an `nnx.Module` is set to evaluation mode.

    Its dropout is then off, and its norms use their running statistics.
    """
    if not isinstance(weights, nnx.Module):
        return weights
    return nnx.view(weights, deterministic=True, use_running_average=True, raise_if_not_found=False)


def checked_weights(weights: Any) -> Any:
    """Checks what a loader returns: an `nnx.Module`, or a tree with arrays."""
    if isinstance(weights, nnx.Module):
        return weights

    def array(leaf: Any) -> Any:
        if isinstance(leaf, list):
            return np.asarray(leaf)
        return as_numpy(leaf) if hasattr(leaf, "detach") else leaf

    weights = jax.tree.map(array, weights, is_leaf=is_list_of_numbers)
    if weights is None:
        raise TypeError("weights: expected the loader to return weights, got None")
    if not any(hasattr(leaf, "dtype") or type(leaf) is float for leaf in jax.tree.leaves(weights)):
        checked_arrays("weights(state_dict)", weights)
    return weights


class TrackedStateDict(UserDict[str, np.ndarray]):
    """A `state_dict` that records which of its arrays have not been read."""

    def __init__(self, arrays: Arrays):
        super().__init__(arrays)
        self.unread = dict.fromkeys(arrays)

    def __getitem__(self, key: str) -> np.ndarray:
        self.unread.pop(key, None)
        return super().__getitem__(key)

    def __missing__(self, key: str) -> np.ndarray:
        raise KeyError(f"weights: the twin has no {key}, it has {', '.join(self.data)}")


def split(model: Any) -> tuple[Any, Any]:
    """The weights and statistics of an NNX module, and its rest; another model is all weights."""
    if not isinstance(model, nnx.Module):
        return model, None
    graphdef, weights, rest = nnx.split(model, WEIGHTS, ...)
    return weights, (graphdef, rest)


def merge(weights: Any, rest: Any) -> Any:
    """A new model from the parts that `split` returned."""
    return weights if rest is None else nnx.merge(rest[0], weights, rest[1], copy=True)


def floating_leaves(tree: Any) -> list[Any]:
    """The arrays of real or complex numbers in a tree."""
    return [*filter(is_inexact, jax.tree.leaves(tree))]


def model_in_dtype(model: Any, dtype: str) -> Any:
    """A copy of the model with floating arrays in a dtype; a module is set to evaluation mode."""

    def cast(leaf: Any) -> Any:
        is_number = is_inexact(leaf) or type(leaf) is float
        return jnp.array(in_dtype(np.asarray(leaf), dtype)) if is_number else leaf

    return in_evaluation_mode(merge(*jax.tree.map(cast, split(model))))
