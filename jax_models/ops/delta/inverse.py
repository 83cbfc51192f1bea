"""Inverts I − A by matrix products, where A says how strongly each step reads earlier ones."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_models.ops.affine import product

WHOLE = 16
"""Up to this number of steps, the inverse is computed from the whole matrix."""


def step_and_other(size: int) -> tuple[Array, Array]:
    """Returns the steps t along the rows of a matrix, and the steps i along its columns."""
    t, i = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return t, i


def pairs(size: int, level: int) -> Array:
    """Marks pairs with t in the second and i in the first of two blocks of 2^level steps."""
    t, i = step_and_other(size)
    t, i = t >> level, i >> level
    return (t & 1 == 1) & (t == i + 1)


@jax.custom_jvp
def inverse_of_steps(scores: Array) -> Array:
    """(I − A)⁻¹ for scores A (…, t, i) that are 0 if i ≥ t, with a power of two of steps.

    It is computed from the inverses of ever larger blocks. It is also the sum of the powers of the
    scores, but these can be much larger than their sum.
    """
    size = scores.shape[-1]
    # More steps are split into halves, which takes fewer products than masks over all of them.
    if size > WHOLE:
        half = size // 2
        halves = jnp.stack([scores[..., :half, :half], scores[..., half:, half:]])
        first, second = inverse_of_steps(halves)
        between = product(product(second, scores[..., half:, :half]), first)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        return jnp.concatenate([upper, jnp.concatenate([between, second], axis=-1)], axis=-2)
    t, i = step_and_other(size)
    identity = jnp.broadcast_to((i == t).astype(scores.dtype), scores.shape)
    inverse = jnp.where(jnp.broadcast_to(pairs(size, 0), scores.shape), scores, identity)
    for level in range(1, size.bit_length() - 1):
        among = jnp.broadcast_to(pairs(size, level), scores.shape)
        between = product(product(inverse, jnp.where(among, scores, 0)), inverse)
        inverse = jnp.where(among, between, inverse)  # on a v6e, libtpu 0.0.42 fails on a sum
    return inverse


@inverse_of_steps.defjvp
def _inverse_jvp(primals, tangents) -> tuple[Array, Array]:
    """The derivative of the inverse, (I − A)⁻¹ dA (I − A)⁻¹."""
    (scores,), (d_scores,) = primals, tangents
    inverse = inverse_of_steps(scores)
    return inverse, product(product(inverse, d_scores), inverse)
