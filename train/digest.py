"""Digests of bytes, and of arrays on any number of devices."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, UInt32

SALTS = (0, 0x9E3779B9)


def bytes_digest(data: bytes = b"") -> "hashlib.blake2b":
    """A digest of these bytes and of those that `update` adds."""
    return hashlib.blake2b(data, digest_size=16)


@jax.jit
def array_digest(x: Array) -> UInt32[Array, "2"]:
    """Two sums modulo 2³² over the elements, after mixing the bits of each with its index.

    A flipped bit changes the mixture of its element, and therefore both sums. A sum of integers
    depends neither on the order nor on how the array is divided over devices.
    """
    bits = _bits(x)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for axis, size in enumerate(bits.shape):
        place = place * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    mixed = (_mix(bits ^ _mix(place + jnp.uint32(salt))) for salt in SALTS)
    return jnp.stack([jnp.sum(each, dtype=jnp.uint32) for each in mixed])


def digests(tree: Any) -> dict[str, Array]:
    """The digest of each array of a tree, by its path, without waiting for the computation."""
    return {path: array_digest(x) for path, x in leaves_by_path(tree).items()}


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree, by their paths: `params.layers.0.kernel`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def dtypes_and_shapes(tree: Any) -> dict[str, str]:
    """The dtype and the shape of each array of a tree, by its path: `float32[8, 3]`."""
    return {path: f"{x.dtype}{[*x.shape]}" for path, x in leaves_by_path(tree).items()}


def hex_digits(digest: UInt32[Array, "2"]) -> str:
    """Sixteen hexadecimal digits."""
    return "".join(f"{int(part):08x}" for part in np.asarray(digest))


def _bits(x: Array) -> UInt32[Array, "..."]:
    """The bits of each element. An element of eight bytes becomes two numbers."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    width = min(x.dtype.itemsize, 4)
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * width}")).astype(jnp.uint32)


def _mix(bits: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """The last step of MurmurHash3: a permutation of the 32-bit integers."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
