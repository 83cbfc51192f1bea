"""The products x W + b of every gate and projection."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def carry_dtype(dtype) -> jnp.dtype:
    """The dtype in which a recurrence computed in `dtype` accumulates: at least float32."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)


def floating_carry_dtype(**arrays: Array) -> jnp.dtype:
    """`carry_dtype` of arrays together, if all of them are floating.

    Raises:
        TypeError: one is not.

    """
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name}: expected a floating dtype, got {array.dtype}")
    with jax.numpy_dtype_promotion("standard"):
        return carry_dtype(jnp.result_type(*arrays.values()))


def affine(
    x: Float[Array, "*batch in"],
    kernel: Float[Array, "in out"],
    bias: Float[Array, " out"] | None = None,
) -> Float[Array, "*batch out"]:
    """`x W + b`: operands in the kernel's dtype, the result in `carry_dtype` of it.

    One product of two axes: of more, XLA's CPU backend takes the kernel's gradient from copies that
    it fills against the order of memory.
    """
    accumulator = carry_dtype(kernel.dtype)
    rows = x.reshape(-1, x.shape[-1]).astype(kernel.dtype)
    y = jnp.matmul(rows, kernel, preferred_element_type=accumulator)
    if bias is not None:
        y = y + jnp.broadcast_to(bias.astype(accumulator), y.shape)
    return y.reshape(*x.shape[:-1], kernel.shape[1])


def joined_affine(
    kernel_ih: Float[Array, "in out"],
    kernel_hh: Float[Array, "hidden out"],
    bias_ih: Float[Array, " out"] | None = None,
    bias_hh: Float[Array, " out"] | None = None,
) -> Callable[[Float[Array, "batch in"], Float[Array, "batch hidden"]], Float[Array, "batch out"]]:
    """The function `(x, h) ↦ x W_ih + b_ih + h W_hh + b_hh`, as one product `[x, h] W + b`."""
    kernel = jnp.concatenate([kernel_ih, kernel_hh])
    biases = [bias for bias in (bias_ih, bias_hh) if bias is not None]
    bias = functools.reduce(jnp.add, biases) if biases else None
    return lambda x, h: affine(
        jnp.concatenate([a.astype(kernel.dtype) for a in (x, h)], axis=-1), kernel, bias
    )
