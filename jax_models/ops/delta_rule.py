"""The generalized delta rule: a matrix-valued state with a decay and a rank-one correction."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float

from jax_models.ops.affine import common_carry_dtype
from jax_models.ops.by_platform import by_platform
from jax_models.ops.checks import checked
from jax_models.ops.delta_rule_chunk import CHUNK, Chunk, across, is_bounded
from jax_models.ops.kernels.matrix_scan import KERNELS
from jax_models.ops.linear_map import linear_map
from jax_models.ops.rows import DividedMasks, Rows, given_rows
from jax_models.ops.time_axis import states_between
from jax_models.ops.varying import alike

DeltaRuleMethod = Literal["auto", "chunked", "sequential", "pallas", "pallas_interpreted"]

FEW_STATES = 2**22
"""In bytes. If all states take at most this much, storing them is faster than recomputing."""
CHUNKS = 8
"""The backward pass stores one state every 8 chunks and recomputes the others."""
GONE = -1e5
"""A log decay whose exponential is zero in every dtype. Lower ones, as −∞, are raised to it."""


@checked()
def delta_rule(
    r: Float[Array, "batch time heads key"],
    log_w: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time heads value"],
    a: Float[Array, "batch time heads key"] | None = None,
    b: Float[Array, "batch time heads key"] | None = None,
    state: Float[Array, "batch heads value key"] | None = None,
    *,
    u: Float[Array, "heads key"] | None = None,
    min_log_w: float | None = None,
    method: DeltaRuleMethod = "auto",
    **masks: Unpack[DividedMasks],
) -> tuple[Float[Array, "batch time heads value"], Float[Array, "batch heads value key"]]:
    """Runs a matrix S per head, which decays, is corrected, and stores a value for each key.

        >>> r, k, v = jnp.ones((3, 8, 100, 4, 64))
        >>> y, state = delta_rule(r, -k, k, v)

        S_t = S_{t−1} (diag(w_t) + a_t b_tᵀ) + v_t k_tᵀ,   w_t = exp(log_w_t)
        y_t = S_t r_t

    With a bonus u for the current step, as in RWKV-6, y reads the state before the step:

        y_t = (S_{t−1} + v_t (u ⊙ k_t)ᵀ) r_t

    These layers are special cases. r is their query, times its scale, and each step and head has a
    decay α and a rate β:

    - RWKV-7: a = −κ̂, b = κ̂ ⊙ η, where κ̂ is the removal key and η the in-context learning rate.
    - DeltaNet: log_w = 0, a = k, b = −βk, and βk takes the place of k. Gated DeltaNet differs in
      log_w = log α, the same for all features of a key, and b = −αβk. Kimi Delta Attention differs
      from DeltaNet in log_w = log α, with one α for each feature of a key, and a = α ⊙ k.
    - RWKV-6 (with u), gated linear attention, RetNet and Mamba-2 (the last two with the same log α
      for all features of a key): without a and b.

    Args:
        r: the receptance, or query.
        log_w: the logarithm of the decay: at most 0, and −∞ to forget everything.
        k: the keys.
        v: the values.
        a: the key with which the correction is read from the state. Give both a and b, or neither.
        b: the key with which the correction is written.
        state: S before the first step. None: zero.
        u: the bonus of the current step. None: y reads the state after the step.
        min_log_w: a lower bound; a log_w below it is raised to it. If it is near 0 (RWKV-7's is
            −e^{−1/2}) and there is no `reset`, chunks need one matrix product instead of four.
        method: "sequential" runs one step after the other; "chunked" computes 16 steps at a time by
            matrix products (Yang et al. 2024, arXiv 2406.06484); "pallas" runs the chunks in one
            kernel of a TPU (`ops.kernels.matrix_scan`); "pallas_interpreted" runs that kernel in an
            interpreter, which is slow but works anywhere. "auto" is sequential on a CPU and below
            16 steps, and chunked elsewhere, since the kernel was not measured yet. With a symbolic
            number of steps, every method is sequential. All compute in at least float32, with the
            highest precision on a TPU. The backward pass stores √time states if sequential, or all
            of them if they take at most 4 MiB; one every 128 steps if chunked; and one every 16 in
            kernels. Unless the method is sequential or `reset` is given, a NaN also reaches the
            outputs of up to 15 steps before it.
        **masks: `lengths`, `reset` and `time_axis`, as in `DividedMasks`; a state restarts from
            zero. The steps of a device turn S into `S M + E`. The devices exchange M and E, so that
            each can compute the S before its own steps and run from there.

    Returns:
        All y (those beyond `lengths` are meaningless) and the last S, in at least float32.

    Raises:
        NotImplementedError: when the program is lowered, "pallas" has no kernel for this device,
            dtype, division over devices or head size. Also if the second derivative of "pallas" is
            taken, or `lengths` are given with a `time_axis`.
        TypeError: an array has another kind of dtype, only one of a and b is given, or u is given
            with them.
        ValueError: a shape is wrong, a length lies outside 0 … time, min_log_w is positive, or
            there is no such method.

    Source: Peng et al. 2025 (RWKV-7, arXiv 2503.14456); Peng et al. 2024 (RWKV-6, 2404.05892).

    """
    rows = given_rows(masks)
    if (a is None) != (b is None):
        raise TypeError("a, b: expected both or neither")
    if a is not None and u is not None:
        raise TypeError("u: expected None where there are a and b, which read the state before")
    if min_log_w is not None and min_log_w > 0:
        raise ValueError(f"min_log_w: expected at most 0, got {min_log_w}")
    batch, time, heads, _ = k.shape
    dtype = common_carry_dtype(*(x for x in (r, log_w, k, v, a, b, state, u) if x is not None))
    if state is None:
        state = jnp.zeros((batch, heads, v.shape[-1], k.shape[-1]), dtype)
    if 0 in v.shape or 0 in k.shape:
        return jnp.zeros(v.shape, dtype), state.astype(dtype)
    if is_symbolic_dim(time) or (method == "auto" and time < CHUNK):
        method = "sequential"
    steps = jax.tree.map(lambda x: x.astype(dtype), Steps(r, log_w, k, v, a, b))
    state, u = state.astype(dtype), u if u is None else u.astype(dtype)
    run = partial(_run, method, min_log_w, rows)
    if rows.time_axis is None:
        return run(steps, state, u)
    state, last = _device_states(run, rows.time_axis, steps, state)
    return run(steps, state, u)[0], last


class Steps(NamedTuple):
    """The arrays of `delta_rule` that have a value for each step."""

    r: Array
    log_w: Array
    k: Array
    v: Array
    a: Array | None
    b: Array | None


def _run(
    method: DeltaRuleMethod, min_log_w: float | None, rows: Rows, xs: Steps, state, u
) -> tuple[Array, Array]:
    return _compiled(method, min_log_w, *alike((xs, state, u, rows)))


def _device_states(run, time_axis: str, xs: Steps, start: Array) -> tuple[Array, Array]:
    """Returns S before this device's steps, and S after the steps of all devices.

    One run computes both E and M: E is the last state of a run from zero, and M that of a run from
    the identity without values.
    """
    batch, heads, values, keys = start.shape
    no_values = jnp.zeros((*xs.v.shape[:-1], keys), xs.v.dtype)
    identity = jnp.broadcast_to(jnp.eye(keys, dtype=start.dtype), (batch, heads, keys, keys))
    _, end = run(
        xs._replace(v=jnp.concatenate([xs.v, no_values], axis=-1)),
        jnp.concatenate([jnp.zeros_like(start), identity], axis=-2),
        None,
    )

    def after(end, state):
        E, M = jnp.split(end, [values], axis=-2)
        return jnp.matmul(state, M, precision="highest") + E

    return states_between(after, end, start, time_axis)


def _delta_rule(
    method: DeltaRuleMethod, min_log_w: float | None, xs: Steps, state, u, rows: Rows
) -> tuple[Array, Array]:
    restart = rows.reset
    least = GONE if min_log_w is None else min_log_w
    xs = xs._replace(log_w=jnp.where(xs.log_w < least, least, xs.log_w))
    xs = jax.tree.map(rows.masked, xs)
    chunk = Chunk(reads_after=u is None, bounded=is_bounded(min_log_w) and restart is None)
    if restart is None:
        return _with_bonus(method, chunk, xs, state, u)
    xs, state, (faults, fault_at_end) = _without_faults(xs, state, restart)
    y, last = _with_bonus(method, chunk, xs, state, u, restart[..., None, None])
    return _nan_where(faults, y), _nan_where(fault_at_end, last)


_compiled = jax.jit(_delta_rule, static_argnums=(0, 1))
"""Compiled, because an eager call would otherwise compile the scan each time."""


def _without_faults(
    xs: Steps, state: Array, restart: Bool[Array, "batch time"]
) -> tuple[Steps, Array, tuple[Array, Array]]:
    """Sets what is not finite to zero, and returns which outputs and last states must be NaN.

    A step that restarts multiplies the state by zero, and zero times NaN would carry a NaN from one
    document to the next.
    """
    finite = jnp.stack([jnp.isfinite(x).all(axis=-1) for x in xs if x is not None]).all(axis=0)
    xs = jax.tree.map(lambda x: jnp.where(finite[..., None], x, 0), xs)
    start = jnp.isfinite(state).all(axis=(-2, -1))
    state = jnp.where(start[..., None, None], state, 0)
    step = jnp.arange(restart.shape[1])[None]
    # The latest step that is not finite, and the first step of the current document; −1 if none.
    latest = lax.cummax(jnp.where(finite, -1, step[..., None]), axis=1)
    begun = lax.cummax(jnp.where(restart, step, -1), axis=1)[..., None]
    faults = jnp.where(begun < 0, (latest >= 0) | ~start[:, None], latest >= begun)
    return xs, state, (faults, faults[:, -1])


def _with_bonus(
    method: DeltaRuleMethod, chunk: Chunk, xs: Steps, state: Array, u, restart=None
) -> tuple[Array, Array]:
    """Returns all y and the last S. At a restart, a step ignores the state before it."""
    r = xs.r
    if restart is not None:
        xs = xs._replace(log_w=jnp.where(restart, GONE, xs.log_w))
        if xs.a is not None:
            xs = xs._replace(a=jnp.where(restart, 0, xs.a))
        if not chunk.reads_after:
            xs = xs._replace(r=jnp.where(restart, 0, xs.r))
    if method == "auto":
        y, last = _fastest(chunk, xs, state)
    elif method == "sequential":
        y, last = _sequential(chunk.reads_after, xs, state)
    elif method in KERNELS:
        y, last = _in_kernel(KERNELS[method], chunk, xs, state)
    else:
        y, last = _chunked(chunk, xs, state)
    if u is not None:
        y += xs.v * jnp.sum(r * u[None, None] * xs.k, axis=-1, keepdims=True)
    return y, last


def _nan_where(faults: Array, x: Array) -> Array:
    return jnp.where(faults.reshape(*faults.shape, *[1] * (x.ndim - faults.ndim)), jnp.nan, x)


def _in_segments(run: Callable, xs: Any, state: Array) -> tuple[Array, Array]:
    """Scans `run(state, xs) -> (state, y)` over segments, which the backward pass recomputes."""
    last, y = lax.scan(jax.checkpoint(run, prevent_cse=False), state, xs)
    return y, last


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _fastest(chunk: Chunk, xs: Steps, state: Array) -> tuple[Array, Array]:
    """Runs step by step on a CPU, and in chunks elsewhere."""
    return by_platform(
        xs,
        state,
        cpu=partial(_sequential, chunk.reads_after),
        default=partial(_chunked, chunk),
    )


@_fastest.defjvp
def _fastest_jvp(chunk: Chunk, primals, tangents):
    """Differentiates without `by_platform`, whose derivative would run the forward pass twice."""

    def run(xs, state):
        forms = {
            "cpu": partial(_by_segment, chunk.reads_after),
            "default": partial(_chunked, chunk),
        }
        return lax.platform_dependent(xs, state, **forms)

    return jax.jvp(run, primals, tangents)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _sequential(reads_after: bool, xs: Steps, state: Array) -> tuple[Array, Array]:
    """Runs one step after the other, and reads the state only once in each.

    If an output reads the state after its step, it is computed together with the next step's
    correction, because a product with one vector takes nearly as long as a product with two.
    """

    def at(t, x):
        return lax.dynamic_index_in_dim(x, t, axis=1, keepdims=False)

    def step(t, carry):
        state, y = carry
        x, read = jax.tree.map(partial(at, t), inputs), lax.max(t - 1, 0) if reads_after else t
        of_r, of_a = _read_by_both(state, at(read, xs.r), x.a)
        y = lax.dynamic_update_index_in_dim(y, of_r, read, axis=1)
        return _after(state, x, of_a), y

    inputs, time = _Inputs.of(xs), xs.k.shape[1]
    y = alike((jnp.zeros(xs.v.shape, state.dtype), xs))[0]
    state, y = lax.fori_loop(0, time, step, (state.mT, y))
    if reads_after:
        y = lax.dynamic_update_index_in_dim(y, _read(state, at(time - 1, xs.r)), time - 1, axis=1)
    return y, state.mT


@_sequential.defjvp
def _sequential_jvp(reads_after: bool, primals, tangents):
    return jax.jvp(partial(_by_segment, reads_after), primals, tangents)


def _by_segment(reads_after: bool, xs: Steps, state: Array) -> tuple[Array, Array]:
    """Computes the same as `_sequential`, in a form that is fast to differentiate.

    The state before each of √time segments is stored for the backward pass, which recomputes those
    within a segment. If all states take at most `FEW_STATES`, all are stored.
    """
    time, state = xs.k.shape[1], state.mT
    xs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), xs)
    r = xs.r
    if reads_after:
        xs = xs._replace(r=jnp.concatenate([jnp.zeros_like(r[:1]), r[:-1]]))
    if is_symbolic_dim(time):
        last, y = lax.scan(_step, state, _Inputs.of(xs))
    else:
        states = time * state.size * state.dtype.itemsize
        few = not is_symbolic_dim(states) and states <= FEW_STATES
        by_segment = jax.tree.map(
            lambda x: _split_axis(x, 0, time if few else math.isqrt(time)), xs
        )
        y, last = _in_segments(partial(lax.scan, _step), _Inputs.of(by_segment), state)
        y = y.reshape(-1, *y.shape[2:])[:time]
    if reads_after:
        y = jnp.concatenate([y[1:], _read(last, r[-1])[None]])
    return jnp.moveaxis(y, 0, 1), last.mT


class _Inputs(NamedTuple):
    """`Steps` with the decays instead of their logarithms.

    The exponentials are computed before the loop. Inside the loop, XLA's CPU backend would compute
    one for each element of the state.
    """

    r: Array
    w: Array
    k: Array
    v: Array
    a: Array | None
    b: Array | None

    @classmethod
    def of(cls, xs: Steps) -> "_Inputs":
        """Computes the inputs of the loop from steps."""
        return cls(*xs._replace(log_w=jnp.exp(xs.log_w)))


@jax.custom_jvp
def _step(state: Array, x: _Inputs) -> tuple[Array, Array]:
    """Returns the transposed state after a step, and what r reads from the state before it."""
    after, of_r, _ = _step_and_correction(state, x)
    return after, of_r


@_step.defjvp
def _step_jvp(primals, tangents):
    after, of_r, of_a = _step_and_correction(*primals)
    return (after, of_r), linear_map(_step_tangent, _step_gradient, (*primals, of_a), tangents)


def _step_and_correction(state: Array, x: _Inputs) -> tuple[Array, Array, Array | None]:
    """Returns the results of `_step`, and what a reads from the state."""
    of_r, of_a = _read_by_both(state, x.r, x.a)
    return _after(state, x, of_a), of_r, of_a


def _after(state: Array, x: _Inputs, of_a: Array | None) -> Array:
    after = state * x.w[..., None] + _outer(x.k, x.v)
    return after if x.b is None or of_a is None else after + _outer(x.b, of_a)


def _step_tangent(residuals, tangents):
    state, x, _ = residuals
    after, of_r, _ = jax.jvp(_step_and_correction, (state, x), tangents)[1]
    return after, of_r


def _step_gradient(residuals, gradients):
    """Transposes `_step_tangent`, with all sums as matrix products, which are fast on a CPU."""
    (state, x, of_a), (after, y) = residuals, gradients
    before = after * x.w[..., None] + _outer(x.r, y)
    w = _einsum("bhkv,bhkv->bhk", after, state)
    v, of_b = _read_by_both(after, x.k, x.b)
    if of_b is not None:
        before += _outer(x.a, of_b)
    r, a = _read_values_by_both(state, y, of_b)
    k, b = _read_values_by_both(after, x.v, of_a)
    return before, _Inputs(r, w, k, v, a, b)


def _read(state: Array, r: Array) -> Array:
    return _einsum("bhk,bhkv->bhv", r, state)


def _read_by_both(state: Array, r: Array, a: Array | None) -> tuple[Array, Array | None]:
    """Reads the state with r and a at once, which takes little longer than reading with one."""
    if a is None:
        return _read(state, r), None
    found = _einsum("bhck,bhkv->bhcv", jnp.stack([r, a], axis=-2), state)
    return found[..., 0, :], found[..., 1, :]


def _read_values_by_both(state: Array, v: Array, u: Array | None) -> tuple[Array, Array | None]:
    """Does the same along the axis of the values."""
    if u is None:
        return _einsum("bhkv,bhv->bhk", state, v), None
    found = _einsum("bhkv,bhcv->bhkc", state, jnp.stack([v, u], axis=-2))
    return found[..., 0], found[..., 1]


def _outer(k: Array, v: Array) -> Array:
    return k[..., :, None] * v[..., None, :]


_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def _split_axis(x: Array, axis: int, size: int) -> Array:
    """Splits an axis into two, (pieces, size), and pads the last piece with zeros."""
    time = x.shape[axis]
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, -time % size)
    x = jnp.pad(x, pads)
    return x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])


def _chunked(chunk: Chunk, xs: Steps, state: Array) -> tuple[Array, Array]:
    """Computes the steps of a chunk by matrix products, for up to `CHUNKS` chunks at once."""
    time = xs.k.shape[1]
    count = min(CHUNKS, -(-time // CHUNK))

    def chunks(state, xs):
        return lax.scan(lambda state, x: across(state, *x), state, chunk.within(*xs))

    by_segment = jax.tree.map(lambda x: _split_axis(x, 0, count), _by_chunk(xs))
    y, last = _in_segments(chunks, by_segment, state)
    return _by_time(y.reshape(-1, *y.shape[2:]), time), last


def _in_kernel(scan: Callable, chunk: Chunk, xs: Steps, state: Array) -> tuple[Array, Array]:
    """Runs the chunks in one kernel, one after the other."""
    (y,), last = scan(chunk, state, [x for x in _by_chunk(xs) if x is not None])
    return _by_time(y, xs.k.shape[1]), last


def _by_chunk(xs: Steps) -> Steps:
    """From (batch, time, heads, features) to (chunks, batch, heads, step, features)."""
    return jax.tree.map(lambda x: jnp.moveaxis(_split_axis(x, 1, CHUNK), (1, 3), (0, 2)), xs)


def _by_time(y: Array, time: int) -> Array:
    """From (chunks, batch, heads, step, features) to (batch, time, heads, features)."""
    y = jnp.moveaxis(y, (0, 2), (1, 3))
    return y.reshape(y.shape[0], -1, *y.shape[3:])[:, :time]
