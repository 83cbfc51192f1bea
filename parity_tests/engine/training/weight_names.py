"""Gives the weights of torch and JAX the same names, to compare two trainings."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from jax_models import to_torch
from jax_models.weights import Table
from jax_models.weights.trees import path_of
from parity_tests.engine.problem import Arrays, in_dtype, is_inexact


class TableNames:
    """Names the weights by torch's keys, through a weight table."""

    def __init__(self, table: Table, parameters: Collection[str]):
        self._table = table
        self._inexact = [row for row in table if row.params and not row.exact]
        self._keys = {key for row in table if row.params for key in row.keys}
        self.trained = self._keys & {*parameters}
        self.unsummed = {key for row in table if row.exact and row.separate for key in row.keys}
        """The keys of weights whose numbers JAX holds unchanged, rather than in sums."""

    def torch_arrays(self, state_dict: Mapping[str, np.ndarray]) -> Arrays:
        """Torch's arrays by key. Those that JAX holds only in sums are converted there and back."""
        compared = {key: value for key, value in state_dict.items() if key in self._keys}
        for row in self._inexact:
            values = row.to_torch(*row.to_jax(*(state_dict[key] for key in row.keys)))
            compared |= zip(row.keys, values, strict=True)
        return compared

    def jax_arrays(self, model: nnx.Module) -> Arrays:
        """The JAX module's arrays by torch key."""
        return {key: a for key, a in to_torch(model, self._table).items() if key in self._keys}


class LoaderNames:
    """Names the weights by their paths in the tree that a loader makes from torch's weights."""

    def __init__(
        self,
        load: Callable[[Mapping[str, Any]], Any],
        state_dict: Mapping[str, np.ndarray],
        parameters: Collection[str],
    ):
        self._load = load
        inexact = {key: value for key, value in state_dict.items() if is_inexact(value)}

        def changed(keys: Collection[str]) -> Arrays:
            """The arrays that the loader makes if the weights of these keys have other values."""
            others = {key: 0.7 * value + 0.1 for key, value in inexact.items() if key in keys}
            return self.torch_arrays({**state_dict, **others})

        loaded = changed(())
        with_other_parameters = changed(parameters)
        with_other_buffers = changed(inexact.keys() - {*parameters})
        self.trained = {
            path
            for path, array in loaded.items()
            if not np.array_equal(array, with_other_parameters[path])
            or np.array_equal(array, with_other_buffers[path])
        }
        """The paths of all arrays except those that are made from buffers alone."""
        numbers = np.concatenate([np.ravel(v) for v in inexact.values()] or [np.empty(0)])
        self.unsummed = {path for path, array in loaded.items() if np.isin(array, numbers).all()}
        """The paths of the arrays whose numbers all occur in torch's weights."""

    def torch_arrays(self, state_dict: Mapping[str, np.ndarray]) -> Arrays:
        """The arrays that the loader makes from torch's weights, by path."""
        return self.jax_arrays(self._load(state_dict))

    def jax_arrays(self, weights: Any) -> Arrays:
        """The real and complex arrays of a tree, or of an NNX module, by their paths."""
        if isinstance(weights, nnx.Module):
            weights = nnx.to_pure_dict(nnx.state(weights))
        return {
            path_of(path): in_dtype(np.asarray(leaf), "float64")
            for path, leaf in jax.tree_util.tree_leaves_with_path(weights)
            if is_inexact(leaf)
        }


Names = TableNames | LoaderNames


def select(arrays: Arrays, names: Collection[str]) -> Arrays:
    """The arrays that have these names."""
    return {name: array for name, array in arrays.items() if name in names}
