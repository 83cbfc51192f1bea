"""The long convolution as a direct sum over the past."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_models.ops.affine import einsum


class LongConv(NamedTuple):
    """A call of `ops.long_conv` without `skip`, in float32 or float64."""

    v: Float[Array, "batch features time"]
    h: Float[Array, "features time"]


@jax.jit  # else each operation of an eager call would be compiled by itself
def run(call: LongConv) -> Float[Array, "batch features time"]:
    """Computes `y_t = Σ_{s ≤ t} h_{t−s} v_s` as a product with a Toeplitz matrix of taps."""
    steps = jnp.arange(call.v.shape[2])
    age = steps[:, None] - steps[None]
    taps = jnp.where(age >= 0, call.h[:, jnp.maximum(age, 0)], 0)
    return einsum("bfs,fts->bft", call.v, taps)
