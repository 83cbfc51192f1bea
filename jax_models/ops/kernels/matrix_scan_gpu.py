"""`matrix_scan` as a kernel for an NVIDIA GPU, by Pallas and Triton."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

LEAST = 16
"""Rows and columns of a matrix in a product."""


def matrix_scan(step, start, xs, *, outputs, reverse=False, interpret=False):
    """A program a row, which goes through time with the state in its registers.

    Matrices are filled up with zeros, to powers of two; those of one row keep it.

    Raises:
        NotImplementedError: the state is not float32, or a vector.

    """
    [state] = start
    time, rows = xs[0].shape[:2]
    if state.dtype != jnp.float32 and not interpret:
        raise NotImplementedError(f"on a GPU the kernel computes in float32, got {state.dtype}")
    if state.shape[1] == 1:
        raise NotImplementedError("the kernel has no product of vectors")
    _, ys = jax.eval_shape(step, state, *(x[0] for x in xs))

    def kernel(start, inputs, results, last):
        row = pl.program_id(0)

        def matrix(ref, *place):
            height, width = ref.shape[-2:]
            tall = 1 if height == 1 else _filled(height)
            wide = _filled(width)
            inside = lax.broadcasted_iota(jnp.int32, (tall, wide), 0) < height
            inside &= lax.broadcasted_iota(jnp.int32, (tall, wide), 1) < width
            first = jnp.zeros((), jnp.int32)  # of row's type, whatever an int's is
            return ref.at[(*place, row, pl.ds(first, tall), pl.ds(first, wide))], inside

        def load(ref, *place):
            where, inside = matrix(ref, *place)
            return plt.load(where, mask=inside, other=0)

        def store(x, ref, *place):
            where, inside = matrix(ref, *place)
            plt.store(where, x, mask=inside)

        def take(i, state):
            t = jnp.asarray(time - 1 - i if reverse else i, jnp.int32)
            state, ys = step(state, *(load(x, t) for x in inputs))
            for ref, y in zip(results, ys, strict=True):
                store(y, ref, t)
            return state

        store(lax.fori_loop(0, time, take, load(start)), last)

    ys, last = pl.pallas_call(
        kernel,
        grid=(rows,),
        out_shape=([y.update(shape=(time, *y.shape)) for y in ys], jax.typeof(state)),
        compiler_params=plt.CompilerParams(num_warps=4),
        interpret=interpret,
    )(state, [*xs])
    return ys, [last]


def _filled(size: int) -> int:
    return max(LEAST, pl.next_power_of_2(size))
