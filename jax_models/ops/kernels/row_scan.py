"""A recurrence of elementwise steps, run as a single kernel that reads every input once."""

from collections.abc import Callable, Sequence
from typing import Protocol

from jaxtyping import Array, Float

from jax_models.ops.kernels import row_scan_gpu, row_scan_tpu
from jax_models.ops.kernels.device_scan import DeviceScan

Rows = Sequence[Float[Array, "batch features"]]
Sequences = Sequence[Float[Array, "batch time features"]]


class RowStep(Protocol):
    """Runs one step of every row, and returns the state after it and the outputs."""

    def __call__(self, state: Rows, *xs: Array) -> tuple[Rows, Rows]: ...


def row_scan(
    step: RowStep,
    start: Rows,
    xs: Sequences,
    *,
    outputs: int,
    reverse: bool = False,
    interpret: bool = False,
    fallback: Callable[[Rows, Sequences], tuple[Sequences, Rows]] | None = None,
) -> tuple[Sequences, Rows]:
    """Runs `state, ys_t = step(state, *xs_t)` for t = 0 … T−1, or T−1 … 0 with `reverse`.

    A kernel runs over time once and keeps the state on the chip. On a TPU it is compiled by Mosaic
    (`row_scan_tpu`), and on an NVIDIA GPU by Triton (`row_scan_gpu`). The GPU kernel was measured
    on an H100. The TPU kernel was compiled for TPUs and runs in an interpreter, but has not run on
    a TPU yet. The kernel is chosen when the program is lowered. Under `vmap`, the mapped axis adds
    rows. The derivative is that of the fallback.

    Args:
        step: the step, elementwise and written with jnp. Pass the same function at each call,
            because compiled programs are cached by it.
        start: the state before the first step, in the dtype of the accumulation.
        xs: the inputs, in any floating dtype. `step` receives them in the dtype of the state.
        outputs: the number of arrays that a step outputs.
        reverse: whether to run from the last step to the first.
        interpret: whether to run the TPU's kernel in Pallas's interpreter, on any device.
        fallback: `fallback(start, xs)` computes the same where no kernel works: in float64 on a
            TPU, or if XLA rather than `shard_map` divides the program over devices.

    Returns:
        The outputs of all steps, and the last state, in the dtype of the state.

    Raises:
        NotImplementedError: when the program is lowered, if there is neither a kernel nor a
            fallback.

    """
    return by_kernel(
        step, start, xs, outputs=outputs, reverse=reverse, interpret=interpret, fallback=fallback
    )


def shapes(_, start, xs, outputs: int):
    return [xs[0].update(dtype=start[0].dtype)] * outputs + [*start]


by_kernel = DeviceScan(
    "row_scan",
    tpu=row_scan_tpu.row_scan,
    gpu=row_scan_gpu.row_scan,
    shapes=shapes,
    axis_of_rows=lambda _: 0,
    alternative="associative",
)
