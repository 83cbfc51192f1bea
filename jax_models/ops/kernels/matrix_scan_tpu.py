"""`matrix_scan` as a TPU kernel, written with Pallas for Mosaic."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES, SUBLANES = 128, 8
"""In VMEM, the width and height of a matrix are padded to multiples of these."""
ROWS = 4
"""The largest number of rows in a block. The products of several rows are independent, so they can
overlap.
"""
BLOCK_BYTES = 2**20
"""The largest size of the blocks of all arrays together. Mosaic has 16 MiB of VMEM, in which the
step's own arrays must also fit.
"""


def matrix_scan(step, start, xs, *, outputs, reverse=False, interpret=False):
    """Runs the grid over time in its innermost dimension, while the state stays in VMEM.

    A block contains the matrices of some rows at one step. Rows beyond the last one are computed
    but not written.

    Raises:
        NotImplementedError: the state is not float32, or the matrices of one row do not fit into
            VMEM.

    """
    [state] = start
    time, rows = xs[0].shape[:2]
    if state.dtype != jnp.float32 and not interpret:
        raise NotImplementedError(f"on a TPU the kernel computes in float32, got {state.dtype}")
    _, ys = jax.eval_shape(step, state, *(x[0] for x in xs))
    row_bytes = sum(_bytes(x) for x in (state, state, *xs, *ys))
    if row_bytes > BLOCK_BYTES:
        raise NotImplementedError(f"a step's matrices are too large: {row_bytes} bytes a row")
    # A block contains as many rows as fit, so that their independent products can overlap.
    block = min(rows, ROWS, BLOCK_BYTES // row_bytes)

    def kernel(start, inputs, results, last):
        # The block of the last state stays in VMEM, so it carries the state from step to step.
        @pl.when(pl.program_id(1) == 0)
        def _():
            last[...] = start[...]

        last[...], ys = step(last[...], *(x[...] for x in inputs))
        for ref, y in zip(results, ys, strict=True):
            ref[...] = y

    def steps(x):
        return pl.BlockSpec(
            (None, block, *x.shape[-2:]), lambda b, t: (time - 1 - t if reverse else t, b, 0, 0)
        )

    of_row = pl.BlockSpec((block, *state.shape[1:]), lambda b, t: (b, 0, 0))
    ys, last = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows, block), time),
        in_specs=(of_row, [steps(x) for x in xs]),
        out_specs=([steps(y) for y in ys], of_row),
        out_shape=([y.update(shape=(time, *y.shape)) for y in ys], state),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
    )(state, [*xs])
    return ys, [last]


def _bytes(x) -> int:
    """The number of bytes that a matrix occupies in VMEM."""
    height, width = x.shape[-2:]
    return 4 * pl.cdiv(height, SUBLANES) * SUBLANES * pl.cdiv(width, LANES) * LANES
