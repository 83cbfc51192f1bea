"""Gradients with respect to a torch module's weights, through a weight table."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_models.weights import Table
from jax_models.weights.rows import Weight
from parity_tests.engine.candidates.adapters import is_floating
from parity_tests.engine.problem import Arrays, in_dtype


def gradients_by_table(
    table: Table,
    state_dict: Mapping[str, np.ndarray],
    owners: Mapping[str, str],
    gradient: nnx.Module,
) -> Arrays:
    """The gradient of each key, from a module that holds gradients in place of its weights.

    Keys with the same owner are one weight, so each gets the sum of their gradients.
    """
    params = {
        ".".join(map(str, path)): np.asarray(param.get_value())
        for path, param in nnx.to_flat_state(nnx.state(gradient))
        if isinstance(param, nnx.Variable) and is_floating(param.get_value())
    }
    rows = [row for row in table if row.params]
    given = [tuple(params[path] for path in row.params) for row in rows]
    by_owner: Arrays = {}
    for row, arrays in zip(rows, gradients(rows, given, state_dict, owners), strict=True):
        for key, array in zip(row.keys, arrays, strict=True):
            by_owner[owners[key]] = by_owner.get(owners[key], 0) + np.asarray(array)
    return {key: by_owner[owner] for key, owner in owners.items() if owner in by_owner}


def gradients(
    rows: Sequence[Weight],
    given: Sequence[tuple[np.ndarray, ...]],
    state_dict: Mapping[str, np.ndarray],
    owners: Mapping[str, str],
) -> Iterator[tuple]:
    """The gradients of each row's keys: by its `gradients`, otherwise by differentiating the row.

    A row that JAX cannot trace is taken for a rearrangement, whose derivative is its inverse.
    """
    derived = {i for i, row in enumerate(rows) if row.gradients is None}

    def pulled_back(some: Collection[int]) -> Mapping[int, tuple]:
        keys = [
            tuple(
                in_dtype(state_dict[key], str(jnp.finfo(given[i][0].dtype).dtype))
                for key in rows[i].keys
            )
            for i in some
        ]
        functions = tuple(rows[i].to_jax for i in some)
        return dict(zip(some, _pulled_back(functions, keys, [given[i] for i in some]), strict=True))

    try:  # compiled together, in much less time than one by one
        found = pulled_back(derived)
    except Exception:  # NumPy raises various errors for traced arrays
        found = {}
    for i, row in enumerate(rows):
        if row.gradients is not None:
            yield row.gradients(*given[i])
        elif i in found:
            yield found[i]
        else:
            try:
                yield pulled_back([i])[i]
            except Exception:
                sharing = [owners[key] for key in row.keys]
                copies = zip(row.to_torch(*given[i]), sharing, strict=True)
                yield tuple(array / sharing.count(owner) for array, owner in copies)


@partial(jax.jit, static_argnums=0)
def _pulled_back(functions: Sequence[Callable], keys: Sequence[tuple], given: Sequence[tuple]):
    return [
        jax.vjp(function, *of_row)[1](gradient)
        for function, of_row, gradient in zip(functions, keys, given, strict=True)
    ]
