"""Rotary position embedding (Su et al., arXiv 2104.09864)."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_models.checks.arguments import checked
from jax_models.checks.values import Positive
from jax_models.ops.affine import carry_dtype


@checked()
def rotary(
    x: Float[Array, "batch time heads head_features"],
    positions: Int[Array, "batch time"],
    *,
    rotated: int,
    theta: Positive = 10_000.0,
    interleaved: bool = False,
    num_pairs: int | None = None,
) -> Float[Array, "batch time heads head_features"]:
    """Rotates the first n = `rotated` features of each head by angles that grow with the position.

        (x_i, x_{i + n/2}) is rotated by p · θ^{−2i/n},   i = 0 … n/2 − 1

    If `interleaved`, neighboring features (x_{2i}, x_{2i + 1}) are rotated instead. With
    `num_pairs`, only the pairs i < num_pairs are rotated (p-RoPE, arXiv 2410.06205). As a result,
    the product of a query and a key depends on the distance of their positions. The angles are
    computed in at least float32.

    Raises:
        ValueError: `rotated` is odd or exceeds the number of features, `num_pairs` is negative or
            exceeds n/2, or θ is not positive.

    """
    checked_rotated("rotated", rotated, x.shape[-1])
    dtype = carry_dtype(x.dtype)
    frequencies = theta ** (-np.arange(0, rotated, 2) / rotated)
    if num_pairs is not None:
        if not 0 <= num_pairs <= rotated // 2:
            raise ValueError(
                f"num_pairs: expected at least 0 and at most rotated / 2 = {rotated // 2}, got "
                f"{num_pairs}"
            )
        frequencies[num_pairs:] = 0
    frequencies = jnp.asarray(frequencies, dtype)
    angles = positions.astype(dtype)[:, :, None, None] * frequencies[None, None, None]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    if interleaved:
        first, second, rest = x[..., :rotated:2], x[..., 1:rotated:2], x[..., rotated:]
        pairs = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return jnp.concatenate([pairs.reshape(*x.shape[:-1], rotated), rest], axis=-1)
    first, second, rest = jnp.split(x, (rotated // 2, rotated), axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def checked_rotated(name: str, rotated: int, head_features: int) -> int:
    """Returns the number of rotated features, or raises an error if it is odd or too large."""
    if rotated % 2 or not 0 <= rotated <= head_features:
        raise ValueError(
            f"{name}: expected an even number of a head's {head_features} features, got {rotated}"
        )
    return rotated
