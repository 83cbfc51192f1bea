"""Arrays inside a `jax.shard_map`, which differ or not along the mesh's axes."""

from typing import Any

import jax


def match_varying_axes(tree: Any) -> Any:
    """The arrays, each marked as varying along all axes along which one of them does.

    The carry of a loop, for example, must vary in the same way before and after each turn. Outside
    of a `jax.shard_map` nothing varies.
    """
    leaves, structure = jax.tree.flatten(tree)
    varying = [jax.typeof(leaf).manual_axis_type.varying for leaf in leaves]
    axes = frozenset().union(*varying)
    return structure.unflatten(
        leaf if axes == own else jax.lax.pcast(leaf, tuple(sorted(axes - own)), to="varying")
        for leaf, own in zip(leaves, varying, strict=True)
    )
