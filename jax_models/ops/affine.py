"""The products x W + b of every gate and projection."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_models.ops.arguments import checked

WIDE_DTYPES = (jnp.float64, jnp.complex64, jnp.complex128)

product = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
"""A matrix product in full precision. XLA's CPU backend fails on arrays of more than eight axes."""
einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
"""A product with a transposed array, of which the backward pass does not store the transpose."""


def carry_dtype(dtype) -> jnp.dtype:
    """The dtype in which a recurrence computed in `dtype` accumulates: at least float32."""
    dtype = jnp.dtype(dtype)
    return dtype if dtype in WIDE_DTYPES else jnp.dtype(jnp.float32)


def common_carry_dtype(*arrays: Array) -> jnp.dtype:
    """`carry_dtype` of the dtype to which the arrays promote together."""
    with jax.numpy_dtype_promotion("standard"):
        return carry_dtype(jnp.result_type(*arrays))


@checked()
def affine(
    x: Float[Array, "*batch blocks*features"],
    kernel: Float[Array, "*blocks features out"],
    bias: Float[Array, " blocks*out"] | None = None,
) -> Float[Array, "*batch blocks*out"]:
    """`x W + b`, with operands in the kernel's dtype and the result in `carry_dtype` of that dtype.

    With (blocks, in, out) kernels, each block of x has its own kernel, and the results are
    concatenated. All batch axes are flattened into one, because otherwise XLA's CPU backend would
    first copy arrays in an order that does not match their memory layout to compute the kernel's
    gradient.
    """
    accumulator = carry_dtype(kernel.dtype)
    count = math.prod(x.shape[:-1])
    if kernel.ndim == 2:
        rows = x.reshape(count, x.shape[-1]).astype(kernel.dtype)
        y = jnp.matmul(rows, kernel, preferred_element_type=accumulator)
    else:
        kernels = kernel.reshape(math.prod(kernel.shape[:-2]), *kernel.shape[-2:])
        rows = x.reshape(count, *kernels.shape[:2]).astype(kernel.dtype)
        blocks = jnp.swapaxes(rows, 0, 1)  # jax 0.12 needs this order on a CPU in bfloat16
        y = jnp.swapaxes(jnp.matmul(blocks, kernels, preferred_element_type=accumulator), 0, 1)
    y = y.reshape(*x.shape[:-1], math.prod(y.shape[1:]))
    return y if bias is None else y + jnp.broadcast_to(bias.astype(accumulator), y.shape)
