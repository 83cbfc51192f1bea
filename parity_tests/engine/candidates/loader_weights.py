"""Weights that a loader returns or a model has, for a comparison in a dtype."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_models.weights.stored import as_numpy
from parity_tests.engine.candidates.adapters import is_floating
from parity_tests.engine.problem import checked_arrays, in_dtype, is_list_of_numbers


def evaluating(weights: Any) -> Any:
    """The same, of an `nnx.Module` for evaluation: without dropout, norms on their statistics."""
    if not isinstance(weights, nnx.Module):
        return weights
    return nnx.view(weights, deterministic=True, use_running_average=True, raise_if_not_found=False)


def checked_loaded(weights: Any) -> Any:
    """What a loader returns: an `nnx.Module`, or a tree with arrays.

    Raises:
        TypeError: there is no array.

    """
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


class Reads(Mapping[str, np.ndarray]):
    """A state_dict that knows which of its arrays have been read."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        self.arrays, self.unread = arrays, dict.fromkeys(arrays)

    def __getitem__(self, key: str) -> np.ndarray:
        if key not in self.arrays:
            raise KeyError(f"weights: the twin has no {key}, it has {', '.join(self.arrays)}")
        self.unread.pop(key, None)
        return self.arrays[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)


def weights_in(weights: Any, dtype: str) -> Any:
    """A copy of the weights, their floating arrays in a dtype; of a module, for evaluation."""
    graphdef = None
    if isinstance(weights, nnx.Module):
        graphdef, weights = nnx.split(weights)
    weights = jax.tree.map(
        lambda a: jnp.array(in_dtype(np.asarray(a), dtype)) if is_number(a) else a, weights
    )
    if graphdef is None:
        return weights
    return evaluating(nnx.merge(graphdef, weights, copy=True))


def is_number(leaf: Any) -> bool:
    """Is it an array of real or complex numbers, or a float of Python's?"""
    return is_floating(leaf) or type(leaf) is float
