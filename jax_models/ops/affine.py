"""The products x W + b of every gate and projection."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float

from jax_models.checks.arguments import checked

WIDE_DTYPES = (jnp.float64, jnp.complex64, jnp.complex128)

product = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
"""A matrix product in full precision. XLA's CPU backend fails on arrays of more than eight axes."""
einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
"""A product with a transposed array, of which the backward pass does not store the transpose."""


def row_sums(x: Array) -> Array:
    """Sums the last axis by a matrix product, which XLA's CPU backend computes fastest."""
    return product(x, jnp.ones((x.shape[-1], 1), x.dtype))


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


PARTS = 8
"""The number of partial products into which a CPU splits the product of a single row."""


def dot_general(
    lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, *, out_sharding=None
):
    """`lax.dot_general`, which reads a large matrix faster on a CPU if it is multiplied by one row.

    Decoding a single text takes as long as reading the weights. XLA's CPU backend reads a large
    float32 matrix faster if the product is split into `PARTS` partial products, which are then
    added. Derivatives and `vmap` use one product.
    """
    (depth, columns), options = rhs.shape[-2:], (precision, preferred_element_type, out_sharding)
    is_row = lhs.shape == (1, depth) and dimension_numbers == (((1,), (0,)), ((), ()))
    is_float32 = lhs.dtype == rhs.dtype == jnp.float32
    # Smaller matrices stay in the cache. With more columns, the partial products do not.
    is_large = depth * columns >= 2**19 and columns <= 2**13 and depth % PARTS == 0
    is_local = jax.sharding.get_abstract_mesh().empty
    if is_row and is_float32 and is_large and is_local and options == (None, None, None):
        return _row_product(lhs, rhs)
    return lax.dot_general(
        lhs,
        rhs,
        dimension_numbers,
        precision,
        preferred_element_type,
        out_sharding=out_sharding,
    )


@custom_vmap
def _split_product(row, kernel):
    return lax.platform_dependent(row, kernel, cpu=_by_parts, default=jnp.matmul)


def _by_parts(row, kernel):
    kernels = kernel.reshape(PARTS, -1, kernel.shape[1])
    return jnp.matmul(row.reshape(PARTS, 1, -1), kernels).sum(0)


@_split_product.def_vmap
def _product_of_rows(_, mapped, row, kernel):
    axes = tuple(0 if is_mapped else None for is_mapped in mapped)
    return jax.vmap(jnp.matmul, axes)(row, kernel), True


_differentiable = jax.custom_jvp(_split_product)


@_differentiable.defjvp
def _jvp(primals, tangents):
    return jax.jvp(jnp.matmul, primals, tangents)


_row_product = jax.jit(_differentiable)  # otherwise each eager call would trace it again
