"""The diagonal linear recurrence in one kernel, for TPUs and NVIDIA GPUs."""

import jax.numpy as jnp
from jaxtyping import Array

from jax_models.ops.forms import Form, known_size
from jax_models.ops.linear import associative
from jax_models.ops.linear.definition import Recurrence, advance
from jax_models.ops.linear.kernels import row_scan_gpu, row_scan_tpu
from jax_models.ops.linear.kernels.row_scan import RowScan
from jax_models.ops.shard_map_axes import match_varying_axes

TARGET_PARALLEL, MIN_PARALLEL, MIN_CHUNK = 2**15, 2**14, 32
"""Limits measured on an H100. If rows × features is at least MIN_PARALLEL, one scan makes full use
of its memory bandwidth. Otherwise time is divided into chunks of at least MIN_CHUNK steps, until
about TARGET_PARALLEL features run in parallel.
"""


def run(call: Recurrence) -> Array:
    """Runs the steps in a kernel, which keeps h on the chip."""
    call = call.without_masks()
    step = _shifted_step if call.shifted else _step
    (h,), _ = SCAN(step, (call.h0,), (call.a, call.b), outputs=1, reverse=call.reverse)
    return h


def refusal(call: Recurrence) -> str | None:
    """Returns why there is no kernel for the call, or None if there may be one.

    Whether there is one for the device and the dtype is known only when the program is lowered.
    """
    return "it supports only real numbers" if jnp.iscomplexobj(call.h0) else None


def pays(call: Recurrence, platform: str, differentiated: bool) -> bool:
    """Small arrays take less time by the associative scan, as measured on an H100."""
    return platform == "tpu" or known_size(*call.a.shape) >= MIN_CHUNK * MIN_PARALLEL


PALLAS = Form("pallas", run, ("cuda", "tpu"), refusal, pays)


def _step(state, a, b):
    (h,) = state
    h = advance(a, h, b)
    return (h,), (h,)


def _shifted_step(state, a, b):
    """Carries the product of h and its factor, which the next step adds to its input."""
    (carried,) = state
    h = carried + b
    return (advance(a, h, 0),), (h,)


def _map(state, a, b):
    """Extends the map `h ↦ P h + E` of all steps so far by one step."""
    p, e = state
    return (advance(a, p, 0), advance(a, e, b)), ()


def _shifted_map(state, a, b):
    p, e = state
    return (advance(a, p, 0), advance(a, e + b, 0)), ()


def scan_gpu(step, start, xs, *, outputs: int, reverse: bool):
    """Runs the GPU's kernel, over chunks of time if the rows are too few to keep a GPU busy.

    The chunks run in parallel, as separate rows. A first scan finds the map `h ↦ P h + E` from the
    state before each chunk to the state after it. A second scan runs each chunk from the state
    before it.
    """
    (a, b), (h0,) = xs, start
    batch, time, features = a.shape
    count = min(TARGET_PARALLEL // (batch * features), time // MIN_CHUNK)
    if count < 2 or batch * features >= MIN_PARALLEL:
        return row_scan_gpu.row_scan(step, start, xs, outputs=outputs, reverse=reverse)
    size = -(-time // count)
    count = -(-time // size)
    if padding := count * size - time:  # steps that do not change the state
        a = jnp.pad(a, ((0, 0), (0, padding), (0, 0)), constant_values=1)
        b = jnp.pad(b, ((0, 0), (0, padding), (0, 0)))
    a, b = (x.reshape(batch * count, size, features) for x in (a, b))
    maps = _shifted_map if step is _shifted_step else _map
    identity = [jnp.full((batch * count, features), x, h0.dtype) for x in (1, 0)]
    one, zero, a, b, h0 = match_varying_axes((*identity, a, b, h0))
    _, (p, e) = row_scan_gpu.row_scan(maps, (one, zero), (a, b), outputs=0, reverse=reverse)

    chunks = p.reshape(batch, count, features), e.reshape(batch, count, features)
    if reverse:
        chunks = [jnp.flip(x, axis=1) for x in chunks]
    ends = associative.scan(*chunks, h0)
    starts = jnp.concatenate([h0[:, None], ends[:, :-1]], axis=1)
    if reverse:
        starts = jnp.flip(starts, axis=1)

    starts = (starts.reshape(batch * count, features),)
    (h,), _ = row_scan_gpu.row_scan(step, starts, (a, b), outputs=1, reverse=reverse)
    h = h.reshape(batch, count * size, features)[:, :time]
    return [h], [h[:, 0 if reverse else -1]]  # the shifted scan does not use the last state


SCAN = RowScan("linear_scan", tpu=row_scan_tpu.compiled, cuda=scan_gpu)
