"""The decays of a chunk whose heads each have one decay for all features."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_models.ops.affine import product
from jax_models.ops.delta.inverse import step_and_other


class Decays(NamedTuple):
    """The decays of a chunk, as products of the decays α of its steps."""

    between: Float[Array, "*heads step step"]
    """D_ti, that of the steps i + 1 … t, and 0 if i > t."""
    from_start: Float[Array, "*heads step 1"]
    """e_t, that of the steps up to t."""
    to_end: Float[Array, "*heads step 1"]
    """f_i, that of the steps after i."""
    fade: Float[Array, "*heads 1 1"]
    """Π α, that of all steps."""

    @classmethod
    def of(cls, log_w: Float[Array, "*heads step 1"]) -> "Decays":
        """Computes the decays from the logarithms of those of the steps."""
        return exponentials(log_sums(log_w))


def log_sums(log_w: Float[Array, "*heads step 1"]) -> Decays:
    """Computes the logarithms of the decays. Those with i > t have no meaning.

    Each sum of log decays has only the terms that it needs, as a product with ones and zeros, so
    that a strong decay costs the other steps no digits, and no exponential overflows.
    """
    t, i = step_and_other(log_w.shape[-2])
    until, after = (steps.astype(log_w.dtype) for steps in (i <= t, i > t))
    between = product(jnp.where(i <= t, log_w.mT, 0), after.mT)
    total = jnp.sum(log_w, axis=-2, keepdims=True)
    return Decays(between, product(until, log_w), product(after, log_w), total)


def exponentials(sums: Decays) -> Decays:
    """Computes the decays from their logarithms."""
    t, i = step_and_other(sums.from_start.shape[-2])
    between, *others = map(jnp.exp, sums)
    return Decays(jnp.where(i <= t, between, 0), *others)
