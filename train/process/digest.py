"""Digests of bytes, and what identifies the arrays of a tree: paths, dtypes and shapes."""

import hashlib
from typing import Any

import jax


def bytes_digest(data: bytes = b"") -> "hashlib.blake2b":
    """A digest of these bytes and of those that `update` adds."""
    return hashlib.blake2b(data, digest_size=16)


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree, by their paths: `params.layers.0.kernel`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def dtypes_and_shapes(tree: Any) -> dict[str, str]:
    """The dtype and the shape of each array of a tree, by its path: `float32[8, 3]`."""
    return {path: f"{x.dtype}{[*x.shape]}" for path, x in leaves_by_path(tree).items()}
