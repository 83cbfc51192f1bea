"""A recurrence of elementwise steps as one kernel of the device, which reads every input once."""

from collections.abc import Callable, Sequence
from typing import Protocol

from jaxtyping import Array, Float

from jax_models.ops.kernels import row_scan_gpu, row_scan_tpu
from jax_models.ops.kernels.device_scan import DeviceScan

Rows = Sequence[Float[Array, "batch features"]]
Sequences = Sequence[Float[Array, "batch time features"]]


class RowStep(Protocol):
    """One step of every row: the state after it, and the outputs."""

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
    """`state, ys_t = step(state, *xs_t)` for t = 0 … T−1, or T−1 … 0 with `reverse`.

    A kernel goes through time once, the state in its registers: Mosaic's on a TPU
    (`row_scan_tpu`), Triton's on an NVIDIA GPU (`row_scan_gpu`). The GPU's kernel was measured
    on an H100. The TPU's was compiled for TPUs and runs in an interpreter, but has not run on a
    TPU yet. The kernel is chosen where the program is lowered. Under `vmap` the rows become more;
    the derivative is the fallback's.

    Args:
        step: elementwise in jnp, the same function at each call: programs are kept by it.
        start: the state before the first step, of the accumulation's dtype.
        xs: the inputs, in any floating dtype; `step` gets them in the state's dtype.
        outputs: how many arrays a step puts out.
        reverse: run from the last step to the first.
        interpret: run the TPU's kernel in Pallas's interpreter, wherever it is.
        fallback: `fallback(start, xs)` does the same where no kernel can serve: in float64 on a
            TPU, or where XLA divides the program over devices by itself, not by `shard_map`.

    Returns:
        The outputs of all steps, and the last state, in the dtype of the state.

    Raises:
        NotImplementedError: there is no kernel and no fallback; when the program is lowered.

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
    instead="associative",
)
