"""Gradients with respect to a torch module's weights, through a weight table."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_models.weights import Table
from jax_models.weights.rows import Weight
from parity_tests.engine.frameworks import is_floating
from parity_tests.engine.problem import Arrays, in_dtype


def gradients_by_table(
    table: Table,
    state_dict: Mapping[str, np.ndarray],
    owners: Mapping[str, str],
    gradient: nnx.Module,
) -> Arrays:
    """The gradient of each key, of a module that holds gradients in the places of its weights.

    Keys with one owner are one weight: each has the gradient of all of them.
    """
    params = {
        ".".join(map(str, path)): np.asarray(param.get_value())
        for path, param in nnx.to_flat_state(nnx.state(gradient))
        if isinstance(param, nnx.Variable) and is_floating(param.get_value())
    }
    by_owner: Arrays = {}
    for row in table:
        if row.params:
            given = tuple(params[path] for path in row.params)
            for key, array in zip(row.keys, gradients(row, given, state_dict, owners), strict=True):
                by_owner[owners[key]] = by_owner.get(owners[key], 0) + np.asarray(array)
    return {key: by_owner[owner] for key, owner in owners.items() if owner in by_owner}


def gradients(
    row: Weight,
    given: tuple[np.ndarray, ...],
    state_dict: Mapping[str, np.ndarray],
    owners: Mapping[str, str],
) -> tuple:
    """The gradients of a row's keys, by the derivative of the row if it does not say it itself.

    A row that JAX cannot trace is taken for a rearrangement, whose derivative is its inverse.
    """
    if row.gradients is not None:
        return row.gradients(*given)
    dtype = str(jnp.finfo(given[0].dtype).dtype)
    keys = [in_dtype(state_dict[key], dtype) for key in row.keys]
    try:
        return jax.vjp(row.to_jax, *map(jnp.asarray, keys))[1](given)
    except Exception:  # whatever NumPy says of what JAX traces
        sharing = [owners[key] for key in row.keys]
        copies = zip(row.to_torch(*given), sharing, strict=True)
        return tuple(array / sharing.count(owner) for array, owner in copies)
