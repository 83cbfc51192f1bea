"""The Gaussian error linear unit (Hendrycks and Gimpel, arXiv 1606.08415, section 2)."""

import math

import jax
from jax import lax
from jaxtyping import Array, Float

from jax_models.checks.arguments import checked


@checked()
def gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The exact GELU, `x Φ(x)`, where Φ is the distribution function of the standard normal.

    It replaces `jax.nn.gelu(x, approximate=False)`, which in jax 0.12 has no derivative inside
    `jax.shard_map`.
    """
    return x * normal_cdf(x)


@jax.custom_jvp
def normal_cdf(x):
    """`Φ(x) = erfc(−x / √2) / 2`."""
    return 0.5 * lax.erfc(-math.sqrt(0.5) * x)


@normal_cdf.defjvp
def _normal_density(primals, tangents):
    (x,), (x_dot,) = primals, tangents
    density = lax.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return normal_cdf(x), density * x_dot
