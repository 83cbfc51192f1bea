"""Kernels on a machine without a TPU or a GPU."""

from functools import partial

import jax
import pytest
from jax.custom_batching import sequential_vmap

from jax_models.ops.linear.kernels import row_scan_tpu
from jax_models.ops.linear.kernels.row_scan import RowScan


@pytest.fixture
def interpreted(monkeypatch):
    """Runs the TPU's kernels in Pallas's interpreter, on any device."""
    used = []

    def run(_, step, start, xs, **options):
        used.append(step)
        kernel = partial(row_scan_tpu.row_scan, step, interpret=True, **options)
        return sequential_vmap(kernel)(start, xs)

    monkeypatch.setattr(RowScan, "__call__", run)
    yield
    if used:
        jax.clear_caches()
