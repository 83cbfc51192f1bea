"""A recurrence of elementwise steps, run as a single kernel that reads every input once."""

from jax_models.ops.kernels import row_scan_gpu, row_scan_tpu
from jax_models.ops.kernels.device_scan import DeviceScan


def shapes(_, start, xs, outputs: int):
    return [xs[0].update(dtype=start[0].dtype)] * outputs + [*start]


row_scan = DeviceScan(
    "row_scan",
    tpu=row_scan_tpu.row_scan,
    gpu=row_scan_gpu.row_scan,
    shapes=shapes,
    axis_of_rows=lambda _: 0,
    alternative="associative",
)
"""Scans elementwise steps over states (batch, features) and inputs (batch, time, features).

A kernel runs over time once and keeps the state on the chip. On a TPU it is compiled by Mosaic
(`row_scan_tpu`), and on an NVIDIA GPU by Triton (`row_scan_gpu`). The GPU kernel was measured on an
H100. The TPU kernel was compiled for TPUs and runs in an interpreter, but has not run on a TPU yet.
The inputs may have any floating dtype; a step receives them in the dtype of the states, which is
that of the accumulation. No kernel works in float64 on a TPU, or if XLA rather than `shard_map`
divides the program over devices.
"""
