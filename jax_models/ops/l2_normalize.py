"""The L2 normalization of queries and keys."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_models.checks.arguments import checked
from jax_models.checks.values import Positive
from jax_models.ops.affine import carry_dtype


@checked()
def l2_normalize(x: Float[Array, "*shape"], *, epsilon: Positive = 1e-6) -> Float[Array, "*shape"]:
    """Scales vectors to a length of 1, and leaves zero vectors at zero.

        >>> k = l2_normalize(jnp.ones((8, 100, 4, 64)))

        y = x / √(Σ x² + ε)

    The sum is over the last axis. ε is inside the root, as in Qwen3-Next, Kimi Linear and fla, so
    that a zero vector, such as the key of a padded step, has the gradient 1 / √ε instead of NaN.

    Args:
        x: the vectors. The computation is in at least float32.
        epsilon: ε.

    Returns:
        The normalized vectors, in x's dtype.

    Raises:
        TypeError: x is not floating.
        ValueError: epsilon is not positive.

    Source: Yang et al. 2024 (Gated DeltaNet, arXiv 2412.06464), for the queries and keys.

    """
    wide = x.astype(carry_dtype(x.dtype))
    square = jnp.sum(wide * wide, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(square + epsilon)).astype(x.dtype)
