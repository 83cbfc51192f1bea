"""The products x W + b of every gate and projection."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_models.ops.arguments import checked

WIDE_DTYPES = (jnp.float64, jnp.complex64, jnp.complex128)


def carry_dtype(dtype) -> jnp.dtype:
    """The dtype in which a recurrence computed in `dtype` accumulates: at least float32."""
    dtype = jnp.dtype(dtype)
    return dtype if dtype in WIDE_DTYPES else jnp.dtype(jnp.float32)


def common_carry_dtype(*arrays: Array) -> jnp.dtype:
    """`carry_dtype` of arrays together."""
    with jax.numpy_dtype_promotion("standard"):
        return carry_dtype(jnp.result_type(*arrays))


@checked()
def affine(
    x: Float[Array, "*batch blocks*features"],
    kernel: Float[Array, "*blocks features out"],
    bias: Float[Array, " blocks*out"] | None = None,
) -> Float[Array, "*batch blocks*out"]:
    """`x W + b`: operands in the kernel's dtype, the result in `carry_dtype` of it.

    With (blocks, in, out) kernels each block of x has its own, and the results stand side by side.
    One product of two axes: of more, XLA's CPU backend takes the kernel's gradient from copies that
    it fills against the order of memory.
    """
    accumulator = carry_dtype(kernel.dtype)
    count = math.prod(x.shape[:-1])
    if kernel.ndim == 2:
        rows = x.reshape(count, x.shape[-1]).astype(kernel.dtype)
        y = jnp.matmul(rows, kernel, preferred_element_type=accumulator)
    else:
        kernels = kernel.reshape(math.prod(kernel.shape[:-2]), *kernel.shape[-2:])
        rows = x.reshape(count, *kernels.shape[:2]).astype(kernel.dtype)
        blocks = jnp.swapaxes(rows, 0, 1)  # first: jax 0.12's CPU has no other order in bfloat16
        y = jnp.swapaxes(jnp.matmul(blocks, kernels, preferred_element_type=accumulator), 0, 1)
    y = y.reshape(*x.shape[:-1], math.prod(y.shape[1:]))
    return y if bias is None else y + jnp.broadcast_to(bias.astype(accumulator), y.shape)
