"""Weight tables for trees of arrays: Linen variables, Equinox modules and haiku parameters."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_models.weights.keys import checked_mapping
from jax_models.weights.layouts import check_rows, placeholder, transformed
from jax_models.weights.stored import as_numpy
from jax_models.weights.tables import Table, checked_rows
from jax_models.weights.transfer import check_entries, check_shape


@checked_rows
def loader(tree: Any, table: Table) -> Callable[[Mapping[str, Any]], Any]:
    """Returns a function that loads a torch `state_dict` into a tree of arrays, by a weight table.

        >>> tree = {"out": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}}
        >>> load = loader(tree, linear("out", "head"))
        >>> load({"head.weight": np.ones((2, 3)), "head.bias": np.ones(2)})["out"]["kernel"].shape
        (3, 2)

    Args:
        tree: Linen variables, an Equinox module, haiku parameters, or any other pytree. Its
            floating arrays are the parameters, and `path_of` defines their names, such as
            `params.out.kernel`.
        table: a weight table that names every parameter once.

    The arrays get the dtypes of the state_dict, and everything else in the tree stays unchanged.
    The function can be differentiated and compiled by `jax.jit`.

    Raises:
        TypeError: `table` is not a list of rows, or the returned function gets no mapping.
        ValueError: a row does not fit the tree. The returned function raises a ValueError if keys
            are missing, unexpected or of another shape, and lists all of them.

    """
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = {path_of(path): leaf for path, leaf in paths}
    params = {path: leaf for path, leaf in leaves.items() if is_floating(leaf)}
    what = f"a tree of {len(params)} arrays"
    check_rows(table, params, "the tree", "table")
    placeholders = {path: placeholder(leaf) for path, leaf in params.items()}

    def load(state_dict: Mapping[str, Any]) -> Any:
        checked_mapping("state_dict", state_dict)
        rows = [row.for_keys(state_dict) for row in table]
        check_entries(rows, placeholders, state_dict, check_shape, what)
        loaded = dict(leaves)
        for row in rows:
            if row.params:
                values = transformed(row, "to_jax", [_read(state_dict[key]) for key in row.keys])
                loaded |= zip(row.params, values, strict=True)
        return jax.tree.unflatten(structure, loaded.values())

    return load


def path_of(path: tuple[Any, ...]) -> str:
    """The name of a leaf in a tree, such as `params.out.kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def is_floating(leaf: Any) -> bool:
    """Whether a leaf is a floating array."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def _read(value: Any) -> Any:
    return value if isinstance(value, jax.Array) else as_numpy(value)
