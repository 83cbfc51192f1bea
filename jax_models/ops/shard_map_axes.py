"""Arrays inside a `jax.shard_map`, which may vary along the axes of the mesh."""

from typing import Any

import jax


def match_varying_axes(tree: Any) -> Any:
    """Marks all arrays as varying along each mesh axis along which at least one of them varies.

    The carry of a loop, for example, must vary along the same axes before and after each iteration.
    Outside of a `jax.shard_map`, nothing varies.
    """
    leaves, structure = jax.tree.flatten(tree)
    axes_of_leaves = [jax.typeof(leaf).manual_axis_type.varying for leaf in leaves]
    axes = frozenset().union(*axes_of_leaves)
    return structure.unflatten(
        leaf if axes == own else jax.lax.pcast(leaf, tuple(sorted(axes - own)), to="varying")
        for leaf, own in zip(leaves, axes_of_leaves, strict=True)
    )
