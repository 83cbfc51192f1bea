"""RWKV-4's weighted average in one kernel, for TPUs and NVIDIA GPUs."""

import jax.numpy as jnp

from jax_models.ops.forms import Form, known_size
from jax_models.ops.linear.kernels import row_scan_gpu, row_scan_tpu
from jax_models.ops.linear.kernels.row_scan import RowScan
from jax_models.ops.linear.wkv.associative import without_masks
from jax_models.ops.linear.wkv.definition import Average, Results, output
from jax_models.ops.linear.wkv.sums import (
    WKVState,
    advance,
    broadcast_like,
    empty_where,
    step_sums_or_empty,
)

MANY, LARGE = 2**12, 2**22
"""On an H100, the kernel was the fastest method, forward and backward, if rows × features was at
least MANY and the total number of elements at least LARGE.
"""
SCAN = RowScan("wkv", tpu=row_scan_tpu.compiled, cuda=row_scan_gpu.row_scan)


def run(call: Average) -> Results:
    """Runs the steps in a kernel. w and u are part of its state, and stay unchanged."""
    xs = [call.k, call.v]
    active, reset = call.rows.active, call.rows.reset
    if active is not None or reset is not None:
        decay, k, v = without_masks(call)
        xs = [k, v, broadcast_like(decay, k)]
    of_rows = (broadcast_like(x, call.state.max) for x in (call.w, call.u))
    start = [*call.state, *of_rows]
    step = _step if call.with_sums else _step_without_sums
    (y, *sums), last = SCAN(step, start, xs, outputs=4 if call.with_sums else 1)
    if active is not None:  # before the first active step, y would be 0 / 0
        y = jnp.where(active[..., None], y, 0)
    return (y, WKVState(*sums) if sums else None), WKVState(*last[:3])


def pays(call: Average, platform: str, differentiated: bool) -> bool:
    """Smaller arrays take less time by the associative scan."""
    batch, _, features = call.k.shape
    many = known_size(batch, features) >= MANY and known_size(*call.k.shape) >= LARGE
    return platform == "tpu" or many


PALLAS = Form("pallas", run, ("cuda", "tpu"), pays=pays)


def _step(state, k, v, *decays):
    *sums, w, u = state
    before = WKVState(*sums)
    [decay] = decays or [w]
    if decays:
        before = empty_where(decay == jnp.inf, before)
    now = step_sums_or_empty(k, v)
    y, _ = output(u, before, now, with_sums=False)
    return (*advance(decay, before, now), w, u), (y, *before)


def _step_without_sums(state, k, v, *decays):
    state, (y, *_) = _step(state, k, v, *decays)
    return state, (y,)
