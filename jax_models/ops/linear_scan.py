"""The methods of the diagonal linear recurrence, each of which suits some devices."""

import math
from functools import cache, partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim

from jax_models.ops.by_platform import by_platform
from jax_models.ops.kernels import row_scan_gpu, row_scan_tpu
from jax_models.ops.kernels.device_scan import KERNEL_METHODS, DeviceScan, known_size
from jax_models.ops.kernels.row_scan import shapes
from jax_models.ops.shard_map_axes import match_varying_axes

LinearRecurrenceMethod = Literal[
    "auto", "associative", "sequential", "chunked", "pallas", "pallas_interpreted"
]

TARGET_PARALLEL, MIN_PARALLEL, MIN_CHUNK = 2**15, 2**14, 32
"""Limits measured on an H100. If rows × features is at least MIN_PARALLEL, one scan makes full use
of its memory bandwidth. Otherwise time is divided into chunks of at least MIN_CHUNK steps, until
about TARGET_PARALLEL features run in parallel.
"""


def solve(method: LinearRecurrenceMethod, a, b, h0, *, reverse: bool, shifted: bool = False):
    """Returns all h. With `shifted`, step t uses the factor of the step before it in the scan.

    The first step then has no factor. It needs none, because h0 is zero. With a symbolic number of
    steps, "auto" is sequential, because an associative scan needs to know the number.
    """
    if method == "auto" and is_symbolic_dim(a.shape[1]):
        method = "sequential"
    # Choose the method by platform. Only the one that runs is traced.
    if method == "auto":
        forms = {
            "cpu": partial(solve, "sequential", reverse=reverse, shifted=shifted),
            "default": partial(solve, "associative", reverse=reverse, shifted=shifted),
        }
        if not jnp.iscomplexobj(h0):
            fallback = _without_kernel(reverse, shifted)
            forms["tpu"] = partial(_in_kernel, fallback, reverse=reverse, shifted=shifted)
            if known_size(*a.shape) >= MIN_CHUNK * MIN_PARALLEL:
                forms["cuda"] = forms["tpu"]
        return by_platform(a, b, h0, **forms)
    # If the caller asks for a kernel by name, there is no fallback.
    if method in KERNEL_METHODS:
        if jnp.iscomplexobj(h0):
            raise NotImplementedError(
                f'method: expected "auto" or "associative" for complex numbers, which the kernel '
                f"does not have, got {method!r}"
            )
        options = {"reverse": reverse, "shifted": shifted, "interpret": KERNEL_METHODS[method]}
        return _in_kernel(None, a, b, h0, **options)
    a, b = a.astype(h0.dtype), b.astype(h0.dtype)
    if method == "sequential":
        return _sequential(a, b, h0, reverse=reverse, shifted=shifted)
    if method == "chunked":
        count = math.isqrt(a.shape[1] - 1) + 1
        return _in_chunks(_scan_rows, count, a, b, h0, reverse=reverse, shifted=shifted)
    # The associative scan runs in one direction, so factors are shifted and time is reversed around
    # it.
    if shifted:
        first = jnp.zeros_like(a[:, :1])  # not the factor at the other end, which may be NaN
        parts = [a[:, 1:], first] if reverse else [first, a[:, :-1]]
        a = jnp.concatenate(parts, axis=1)
    if reverse:
        a, b = jnp.flip(a, axis=1), jnp.flip(b, axis=1)
    h = _associative(a, b, h0)
    return jnp.flip(h, axis=1) if reverse else h


def _sequential(a, b, h0, *, reverse: bool, shifted: bool):
    """Runs one step after the other, and writes each h_t in the place of its b_t."""
    time = a.shape[1]
    behind = (1 if reverse else -1) if shifted else 0

    def step(i, carry):
        h, hs = carry
        t = time - 1 - i if reverse else i
        a_t = lax.dynamic_index_in_dim(a, t + behind, axis=1, keepdims=False)
        b_t = lax.dynamic_index_in_dim(hs, t, axis=1, keepdims=False)
        h = lax.optimization_barrier(advance(a_t, h, b_t))  # XLA would copy hs to read b_t again
        return h, lax.dynamic_update_index_in_dim(hs, h, t, axis=1)

    return lax.fori_loop(0, time, step, (h0, b))[1]


def _in_kernel(fallback, a, b, h0, *, reverse: bool, shifted: bool, interpret: bool = False):
    step = _shifted_step if shifted else _step
    options = {"outputs": 1, "reverse": reverse, "interpret": interpret, "fallback": fallback}
    (h,), _ = _by_kernel(step, (h0,), (a, b), **options)
    return h


def _scan_gpu(step, start, xs, *, outputs: int, reverse: bool):
    """Runs the GPU's kernel, over chunks of time if the rows are too few to keep a GPU busy."""
    (a, b), (h0,) = xs, start
    batch, time, features = a.shape
    count = min(TARGET_PARALLEL // (batch * features), time // MIN_CHUNK)
    if count < 2 or batch * features >= MIN_PARALLEL:
        return row_scan_gpu.row_scan(step, start, xs, outputs=outputs, reverse=reverse)
    scan, shifted = row_scan_gpu.row_scan, step is _shifted_step
    h = _in_chunks(scan, count, a, b, h0, reverse=reverse, shifted=shifted)
    return [h], [h[:, 0 if reverse else -1]]  # with `shifted`, the last state is not used


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


_by_kernel = DeviceScan(
    "linear_scan",
    tpu=row_scan_tpu.row_scan,
    gpu=_scan_gpu,
    shapes=shapes,
    axis_of_rows=lambda _: 0,
    alternative="associative",
)


@cache
def _without_kernel(reverse: bool, shifted: bool):
    """Returns a fallback of `row_scan` by the associative method."""

    def scan(start, xs):
        h = solve("associative", *xs, *start, reverse=reverse, shifted=shifted)
        end = 0 if reverse else -1
        last = h[:, end]
        return [h], [advance(xs[0][:, end].astype(h.dtype), last, 0) if shifted else last]

    return scan


def advance(a, h, b):
    """`a h + b`, or b if a is 0, even if h is NaN."""
    return jnp.where(a == 0, b, a * h + b)


def _combine(first, second):
    """Combines two steps into one: `h ↦ a₂ (a₁ h + b₁) + b₂`."""
    (a1, b1), (a2, b2) = first, second
    return advance(a2, a1, 0), advance(a2, b1, b2)


def _associative(a, b, h0):
    first = advance(a[:, :1], h0[:, None], b[:, :1])
    b = jnp.concatenate([first, b[:, 1:]], axis=1)  # includes h0, so only b is needed below
    return lax.associative_scan(_combine, (a, b), axis=1)[1]


def _scan_rows(step, start, xs, *, outputs: int, reverse: bool):
    """Computes the same as `row_scan` with `jax.lax.scan`."""
    xs = tuple(jnp.moveaxis(x, 1, 0) for x in xs)
    last, ys = lax.scan(lambda state, x: step(state, *x), start, xs, reverse=reverse)
    return [jnp.moveaxis(y, 0, 1) for y in ys], last


def _in_chunks(scan, count: int, a, b, h0, *, reverse: bool, shifted: bool):
    """Runs chunks of time in parallel, as separate rows.

    The first scan finds the map `h ↦ P h + E` from the state before each chunk to the state after
    it. The second scan runs each chunk from the state before it.
    """
    batch, time, features = a.shape
    size = -(-time // count)
    count = -(-time // size)
    if padding := count * size - time:  # steps that do not change the state
        a = jnp.pad(a, ((0, 0), (0, padding), (0, 0)), constant_values=1)
        b = jnp.pad(b, ((0, 0), (0, padding), (0, 0)))
    a, b = (x.reshape(batch * count, size, features) for x in (a, b))
    step, maps = (_shifted_step, _shifted_map) if shifted else (_step, _map)
    identity = [jnp.full((batch * count, features), x, h0.dtype) for x in (1, 0)]
    one, zero, a, b, h0 = match_varying_axes((*identity, a, b, h0))
    _, (p, e) = scan(maps, (one, zero), (a, b), outputs=0, reverse=reverse)

    chunks = p.reshape(batch, count, features), e.reshape(batch, count, features)
    if reverse:
        chunks = jax.tree.map(partial(jnp.flip, axis=1), chunks)
    ends = _associative(*chunks, h0)
    starts = jnp.concatenate([h0[:, None], ends[:, :-1]], axis=1)
    if reverse:
        starts = jnp.flip(starts, axis=1)

    starts = (starts.reshape(batch * count, features),)
    (h,), _ = scan(step, starts, (a, b), outputs=1, reverse=reverse)
    return h.reshape(batch, count * size, features)[:, :time]
