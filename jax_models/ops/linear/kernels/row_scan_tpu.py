"""`row_scan` as a TPU kernel, written with Pallas for Mosaic."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES, SUBLANES = 128, 32
"""A block has multiples of these numbers of features and steps, or else all features or steps."""
REGISTER_SIZE = 1024
"""The number of features of a block times its number of rows, which is the size of a register."""
BLOCK_BYTES = 2**23
"""The largest size of all blocks together. Mosaic has 16 MiB of VMEM."""
UNROLL = 8
"""The number of steps that are unrolled, a power of two."""


def compiled(step, start, xs, **options):
    """Runs `row_scan` without x64, because Mosaic does not support 64-bit integers."""
    with jax.enable_x64(False):
        return row_scan(step, start, xs, **options)


def row_scan(step, start, xs, *, outputs, reverse=False, interpret=False):
    """Runs the grid over time in its innermost dimension, while the state stays in VMEM.

    Blocks have the axes of the arrays: rows of the batch, steps, and features along the lanes.
    Steps of the last block that lie beyond the end are not computed. Lanes and rows beyond the end
    are computed but not written. Inputs of another dtype are cast to that of the state one block at
    a time.

    Raises:
        NotImplementedError: the state is not float32.

    """
    batch, time, features = xs[0].shape
    dtype = start[0].dtype
    if dtype != jnp.float32 and not interpret:
        raise NotImplementedError(f"on a TPU the kernel computes in float32, got {dtype}")
    # VMEM holds two copies of each block, so that one is loaded while the other is in use.
    streams = 2 * (len(xs) + outputs) + sum(x.dtype != dtype for x in xs)
    block = _block(batch, time, features, streams)
    rows, steps, width = block
    blocks = pl.cdiv(time, steps)

    def place(b, d, t):
        return b, blocks - 1 - t if reverse else t, d

    def kernel(starts, inputs, results, lasts, carried, staged):
        number = pl.program_id(2)

        # The state is carried from block to block in scratch memory.
        @pl.when(number == 0)
        def _():
            for ref, first in zip(carried, starts, strict=True):
                ref[...] = first[:, 0]

        # Inputs of another dtype are cast a block at a time.
        for ref, stage in zip(inputs, staged, strict=True):
            if stage is not None:
                stage[...] = ref[...].astype(dtype)
        read = [ref if stage is None else stage for ref, stage in zip(inputs, staged, strict=True)]

        # The last block may have fewer steps.
        here = steps
        if time % steps:
            here = jnp.minimum(steps, time - place(0, 0, number)[1] * steps)

        def one(i, state):
            t = here - 1 - i if reverse else i
            state, ys = step(state, *(x[:, t] for x in read))
            for ref, y in zip(results, ys, strict=True):
                ref[:, t] = y
            return tuple(state)

        def several(i, state):
            for j in range(UNROLL):
                state = one(i * UNROLL + j, state)
            return state

        # Run unrolled groups of steps, then the remaining steps.
        whole = here >> UNROLL.bit_length() - 1
        state = lax.fori_loop(0, whole, several, tuple(ref[...] for ref in carried))
        state = lax.fori_loop(whole * UNROLL, here, one, state)
        for ref, last, x in zip(carried, lasts, state, strict=True):
            ref[...] = x
            last[:, 0] = x

    # A state is a sequence of one step, because a block needs at least two axes.
    sequence = pl.BlockSpec(block, place)
    row = pl.BlockSpec((rows, 1, width), lambda b, d, t: (b, 0, d))
    start = [x[:, None] for x in start]
    ys, last = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(batch, rows), pl.cdiv(features, width), blocks),
        in_specs=([row] * len(start), [sequence] * len(xs)),
        out_specs=([sequence] * outputs, [row] * len(start)),
        out_shape=jax.eval_shape(lambda x: ([x.astype(dtype)] * outputs, start), xs[0]),
        scratch_shapes=(
            [pltpu.VMEM((rows, width), dtype)] * len(start),
            [None if x.dtype == dtype else pltpu.VMEM(block, dtype) for x in xs],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
    )(start, [*xs])
    return ys, [x[:, 0] for x in last]


def _block(batch: int, time: int, features: int, streams: int) -> tuple[int, int, int]:
    """The rows, steps and features of a block, if VMEM must hold `streams` blocks in float32."""
    width = min(features, REGISTER_SIZE)
    lanes = pl.cdiv(width, LANES) * LANES
    rows = min(batch, REGISTER_SIZE // lanes)
    steps = BLOCK_BYTES // (4 * streams * rows * lanes) // SUBLANES * SUBLANES
    return rows, min(time, max(steps, SUBLANES)), width
