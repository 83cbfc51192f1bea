"""`row_scan` as a kernel for NVIDIA GPUs, written with Pallas for Triton."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

LANES = 32
"""The number of features of one program, which is a warp with one thread per feature."""
GROUP = 16
"""The number of steps in a group. One group is loaded while the previous one is computed."""


def row_scan(step, start, xs, *, outputs, reverse=False, interpret=False):
    """Runs one program for each row of the batch and each 32 features, over all of time.

    While 16 steps are computed, the inputs of the next 16 are loaded into registers.
    batch × features must be large to make full use of the GPU's memory bandwidth.

    Raises:
        NotImplementedError: JAX cannot compile for a GPU on this machine.

    """
    from jax.experimental.pallas import triton as plt  # importing it takes 0.1 s

    if not interpret and jax.__version_info__ >= (0, 11) and jax.default_backend() != "gpu":
        raise NotImplementedError("from JAX 0.11 on, a machine without a GPU cannot compile it")
    batch, time, features = xs[0].shape
    dtype = start[0].dtype
    # Steps are processed in groups of AHEAD, so that a group is computed while the next is loaded.
    groups = time // GROUP

    def kernel(starts, inputs, results, lasts):
        row, first = pl.program_id(0), pl.program_id(1) * LANES
        lanes = pl.ds(first, LANES)
        inside = first + lax.iota(jnp.int32, LANES) < features

        def at(t):
            return row, jnp.asarray(time - 1 - t if reverse else t, jnp.int32), lanes

        def load(t):
            mask = inside & (t < time)
            return [plt.load(x.at[at(t)], mask=mask, other=0).astype(dtype) for x in inputs]

        def load_group(group):
            return [load(group * GROUP + j) for j in range(GROUP)]

        def advance(t, state, now):
            state, ys = step(state, *now)
            for ref, y in zip(results, ys, strict=True):
                plt.store(ref.at[at(t)], y, mask=inside)
            return tuple(state)

        def take(group, state_and_inputs):
            state, now = state_and_inputs
            following = load_group(group + 1)
            for j in range(GROUP):
                state = advance(group * GROUP + j, state, now[j])
            return state, following

        # The steps after the last whole group are already loaded, so compute them one by one.
        state = tuple(plt.load(s.at[row, lanes], mask=inside, other=0) for s in starts)
        state, now = lax.fori_loop(0, groups, take, (state, load_group(0)))
        for j in range(time % GROUP):
            state = advance(groups * GROUP + j, state, now[j])
        for ref, x in zip(lasts, state, strict=True):
            plt.store(ref.at[row, lanes], x, mask=inside)

    return pl.pallas_call(
        kernel,
        grid=(batch, pl.cdiv(features, LANES)),
        out_shape=jax.eval_shape(lambda x: ([x.astype(dtype)] * outputs, start), xs[0]),
        compiler_params=plt.CompilerParams(num_warps=1),
        interpret=interpret,
    )(start, xs)
