"""Gradients with respect to a torch module's weights, through a weight table."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_models.weights import Table
from parity_tests.engine.frameworks import is_floating
from parity_tests.engine.problem import Arrays, in_dtype


def gradients_by_table(
    table: Table, state_dict: Mapping[str, np.ndarray], gradient: nnx.Module
) -> Arrays:
    """The gradient of each key, of a module that holds gradients in the places of its weights.

    That is by the derivative of the key's row, if the row does not say it itself. A row that JAX
    cannot trace is taken for a rearrangement, whose derivative is its inverse.
    """
    params = {
        ".".join(map(str, path)): np.asarray(param.get_value())
        for path, param in nnx.to_flat_state(nnx.state(gradient))
        if isinstance(param, nnx.Variable) and is_floating(param.get_value())
    }
    by_key = {}
    for row in table:
        if not row.params:
            continue
        given = tuple(params[path] for path in row.params)
        if row.gradients is not None:
            gradients = row.gradients(*given)
        else:
            keys = [in_dtype(state_dict[key], str(given[0].dtype)) for key in row.keys]
            try:
                gradients = jax.vjp(row.to_jax, *map(jnp.asarray, keys))[1](given)
            except Exception:  # whatever NumPy says of what JAX traces
                gradients = row.to_torch(*given)
        by_key |= zip(row.keys, map(np.asarray, gradients), strict=True)
    return by_key
