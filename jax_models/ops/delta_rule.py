"""The generalised delta rule: a matrix-valued state with a decay and a rank-one correction."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int

from jax_models.ops.affine import common_carry_dtype
from jax_models.ops.by_platform import by_platform
from jax_models.ops.checks import checked
from jax_models.ops.delta_rule_chunk import CHUNK, Chunk, across, is_bounded
from jax_models.ops.kernels.matrix_scan import KERNELS
from jax_models.ops.linear_map import linear_map
from jax_models.ops.segments import mask_padding, segments
from jax_models.ops.time_axis import refuse_lengths, states_between
from jax_models.ops.varying import alike

DeltaRuleMethod = Literal["auto", "chunked", "sequential", "pallas", "pallas_interpreted"]

FEW_STATES = 2**22
"""Bytes, which take less time to store than to compute again."""
CHUNKS = 8
"""Chunks between the states that the backward pass stores; it computes the others again."""
GONE = -1e5
"""A log decay whose exponential is zero in every dtype. A smaller one counts as this."""


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
    lengths: Int[Array, " batch"] | None = None,
    reset: Bool[Array, "batch time"] | None = None,
    method: DeltaRuleMethod = "auto",
    time_axis: str | None = None,
) -> tuple[Float[Array, "batch time heads value"], Float[Array, "batch heads value key"]]:
    """A matrix S a head that decays, is corrected, and learns a value for each key.

        >>> r, k, v = jnp.ones((3, 8, 100, 4, 64))
        >>> y, state = delta_rule(r, -k, k, v)

        S_t = S_{t−1} (diag(w_t) + a_t b_tᵀ) + v_t k_tᵀ,   w_t = exp(log_w_t)
        y_t = S_t r_t

    and with a bonus u for the current step, as in RWKV-6, which reads the state before it:

        y_t = (S_{t−1} + v_t (u ⊙ k_t)ᵀ) r_t

    Known layers are cases of it, with their query as r, times its scale, and per step and head a
    decay α and a rate β:

    - RWKV-7: a = −κ̂, b = κ̂ ⊙ η, where κ̂ is the removal key and η the in-context learning rate.
    - DeltaNet: log_w = 0, a = k, b = −βk, and βk for k; Gated DeltaNet: log_w = log α for all keys,
      b = −αβk; Kimi Delta Attention: α by key, a = α ⊙ k, b = −βk.
    - RWKV-6 (with u), gated linear attention, RetNet and Mamba-2 (log α for all keys): without a
      and b.

    Args:
        r: the receptance, or query.
        log_w: the logarithm of the decay; at most 0, and −∞ where nothing remains.
        k: the keys.
        v: the values.
        a: what is read from the state to correct it; with b, or neither.
        b: where the correction is written.
        state: S before the first step; zero when None.
        u: the bonus of the current step. None: y reads the state after the step.
        min_log_w: no log_w is below it; one that is counts as it. Where it is near 0 (RWKV-7's is
            −e^{−1/2}), and there is no `reset`, chunks take one product for what else takes four.
        lengths: row b takes only the steps t < lengths[b].
        reset: the first steps of packed documents, where the state restarts from zero.
        method: "sequential", a `lax.scan` over the steps; "chunked", 16 steps as products of
            matrices (Yang et al. 2024, arXiv 2406.06484); "pallas", the chunks in one kernel
            (`ops.kernels.matrix_scan`); "pallas_interpreted", the TPU's kernel in an interpreter,
            anywhere and slowly; "auto", sequential on a CPU and below 16 steps, chunked elsewhere,
            since no kernel was measured yet. A symbolic number of steps is taken sequentially by
            any method. All compute in at least float32, with the highest precision on a TPU. The
            backward pass keeps √time states, in chunks one every 128 steps, in kernels one every
            16. Without `reset`, a NaN reaches outputs up to 15 steps before it, unless the
            method is sequential.
        time_axis: the mesh axis over whose devices time is divided, inside a `jax.shard_map`. The
            steps of a device make `S M + E` of S: the devices exchange M and E, and each then runs
            from the S before it.

    Returns:
        All y (those beyond `lengths` carry no meaning) and the last S, in at least float32.

    Raises:
        NotImplementedError: "pallas" has no kernel for this device, dtype, division over devices or
            size of a head; when the program is lowered. Or the second derivative of "pallas" is
            taken, or `lengths` are given with a `time_axis`.
        TypeError: an array is of another kind of dtype, or b is given without a, or u with them.
        ValueError: a shape is wrong, a length lies outside 0 … time, min_log_w is positive, or
            there is no such method.

    Source: Peng et al. 2025 (RWKV-7, arXiv 2503.14456); Peng et al. 2024 (RWKV-6, 2404.05892).

    """
    refuse_lengths(lengths, time_axis)
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
    run = partial(_run, method, min_log_w, lengths=lengths, reset=reset)
    if time_axis is None:
        return run(steps, state, u)
    state, last = _between(run, time_axis, steps, state)
    return run(steps, state, u)[0], last


class Steps(NamedTuple):
    """What some steps do."""

    r: Array
    log_w: Array
    k: Array
    v: Array
    a: Array | None
    b: Array | None


def _run(
    method: DeltaRuleMethod, min_log_w: float | None, xs: Steps, state, u, *, lengths, reset
) -> tuple[Array, Array]:
    return _compiled(method, min_log_w, *alike((xs, state, u, lengths, reset)))


def _between(run, time_axis: str, xs: Steps, start: Array) -> tuple[Array, Array]:
    """S before this device's steps, and after those of all devices.

    E and M are the last states of one run, from zero and, without values, from the identity.
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
    method: DeltaRuleMethod, min_log_w: float | None, xs: Steps, state, u, lengths, reset
) -> tuple[Array, Array]:
    _, restart = segments(xs.k.shape[1], lengths, reset)
    least = GONE if min_log_w is None else min_log_w
    xs = xs._replace(log_w=jnp.where(xs.log_w < least, least, xs.log_w))
    xs = jax.tree.map(lambda x: mask_padding(x, lengths), xs)
    chunk = Chunk(reads_after=u is None, bounded=is_bounded(min_log_w) and restart is None)
    if restart is None:
        return _with_bonus(method, chunk, xs, state, u)
    xs, state, (faults, fault_at_end) = _apart(xs, state, restart)
    y, last = _with_bonus(method, chunk, xs, state, u, restart[..., None, None])
    return _nan_where(faults, y), _nan_where(fault_at_end, last)


_compiled = jax.jit(_delta_rule, static_argnums=(0, 1))
"""Compiled once for all calls that nobody else compiles."""


def _apart(
    xs: Steps, state: Array, restart: Bool[Array, "batch time"]
) -> tuple[Steps, Array, tuple[Array, Array]]:
    """Steps and a state of finite numbers, and which outputs and last states are not to be finite.

    In a product with zeros NaN would pass from one document to the next.
    """
    finite = jnp.stack([jnp.isfinite(x).all(axis=-1) for x in xs if x is not None]).all(axis=0)
    xs = jax.tree.map(lambda x: jnp.where(finite[..., None], x, 0), xs)
    start = jnp.isfinite(state).all(axis=(-2, -1))
    state = jnp.where(start[..., None, None], state, 0)
    step = jnp.arange(restart.shape[1])[None]
    latest = lax.cummax(jnp.where(finite, -1, step[..., None]), axis=1)  # fault, or −1
    begun = lax.cummax(jnp.where(restart, step, -1), axis=1)[..., None]  # document, or −1
    faults = jnp.where(begun < 0, (latest >= 0) | ~start[:, None], latest >= begun)
    return xs, state, (faults, faults[:, -1])


def _with_bonus(
    method: DeltaRuleMethod, chunk: Chunk, xs: Steps, state: Array, u, restart=None
) -> tuple[Array, Array]:
    """All y and the last S. A step at a restart keeps and reads nothing of the state before it."""
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
    """`run(state, xs) -> (state, y)` over the first axis; the backward pass runs it again."""
    last, y = lax.scan(jax.checkpoint(run, prevent_cse=False), state, xs)
    return y, last


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _fastest(chunk: Chunk, xs: Steps, state: Array) -> tuple[Array, Array]:
    """Step by step on a CPU, in chunks elsewhere."""
    return by_platform(
        xs,
        state,
        cpu=partial(_sequential, chunk.reads_after),
        default=partial(_chunked, chunk),
    )


@_fastest.defjvp
def _fastest_jvp(chunk: Chunk, primals, tangents):
    """The derivative of `by_platform` would run the chosen form twice."""

    def run(xs, state):
        forms = {
            "cpu": partial(_by_segment, chunk.reads_after),
            "default": partial(_chunked, chunk),
        }
        return lax.platform_dependent(xs, state, **forms)

    return jax.jvp(run, primals, tangents)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _sequential(reads_after: bool, xs: Steps, state: Array) -> tuple[Array, Array]:
    """One step after the other, each of which reads the state only once.

    Where an output reads the state after its step, it is computed together with the next step's
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
    """`_sequential` in a form that is fast to differentiate.

    The backward pass stores the states before √time segments, and computes those within a segment
    again. Few states are all stored.
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
        by_segment = jax.tree.map(lambda x: _cut(x, 0, time if few else math.isqrt(time)), xs)
        y, last = _in_segments(partial(lax.scan, _step), _Inputs.of(by_segment), state)
        y = y.reshape(-1, *y.shape[2:])[:time]
    if reads_after:
        y = jnp.concatenate([y[1:], _read(last, r[-1])[None]])
    return jnp.moveaxis(y, 0, 1), last.mT


class _Inputs(NamedTuple):
    """`Steps` with the decays themselves.

    In the loop, XLA's CPU backend would compute the exponential for each element of the state.
    """

    r: Array
    w: Array
    k: Array
    v: Array
    a: Array | None
    b: Array | None

    @classmethod
    def of(cls, xs: Steps) -> "_Inputs":
        """Those of steps."""
        return cls(*xs._replace(log_w=jnp.exp(xs.log_w)))


@jax.custom_jvp
def _step(state: Array, x: _Inputs) -> tuple[Array, Array]:
    """The transposed state after a step, and what r reads of the one before it."""
    after, of_r, _ = _step_and_correction(state, x)
    return after, of_r


@_step.defjvp
def _step_jvp(primals, tangents):
    after, of_r, of_a = _step_and_correction(*primals)
    return (after, of_r), linear_map(_step_tangent, _step_gradient, (*primals, of_a), tangents)


def _step_and_correction(state: Array, x: _Inputs) -> tuple[Array, Array, Array | None]:
    """Also what a reads of the state."""
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
    """Its transpose, whose sums are all products: XLA's CPU backend computes those fastest."""
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
    """What r and a read: a product with two vectors takes little longer than one with one."""
    if a is None:
        return _read(state, r), None
    found = _einsum("bhck,bhkv->bhcv", jnp.stack([r, a], axis=-2), state)
    return found[..., 0, :], found[..., 1, :]


def _read_values_by_both(state: Array, v: Array, u: Array | None) -> tuple[Array, Array | None]:
    """The same along the values."""
    if u is None:
        return _einsum("bhkv,bhv->bhk", state, v), None
    found = _einsum("bhkv,bhcv->bhkc", state, jnp.stack([v, u], axis=-2))
    return found[..., 0], found[..., 1]


def _outer(k: Array, v: Array) -> Array:
    return k[..., :, None] * v[..., None, :]


_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def _cut(x: Array, axis: int, size: int) -> Array:
    """Pieces of `size` steps along two axes instead of one, the last one filled up with zeros."""
    time = x.shape[axis]
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, -time % size)
    x = jnp.pad(x, pads)
    return x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])


def _chunked(chunk: Chunk, xs: Steps, state: Array) -> tuple[Array, Array]:
    """Products of matrices within chunks, of which some are computed together."""
    time = xs.k.shape[1]
    count = min(CHUNKS, -(-time // CHUNK))

    def chunks(state, xs):
        return lax.scan(lambda state, x: across(state, *x), state, chunk.within(*xs))

    by_segment = jax.tree.map(lambda x: _cut(x, 0, count), _by_chunk(xs))
    y, last = _in_segments(chunks, by_segment, state)
    return _by_time(y.reshape(-1, *y.shape[2:]), time), last


def _in_kernel(scan: Callable, chunk: Chunk, xs: Steps, state: Array) -> tuple[Array, Array]:
    """One chunk after the other, each of them whole."""
    (y,), last = scan(chunk, state, [x for x in _by_chunk(xs) if x is not None])
    return _by_time(y, xs.k.shape[1]), last


def _by_chunk(xs: Steps) -> Steps:
    """(batch, time, heads, features) as (chunks, batch, heads, step, features)."""
    return jax.tree.map(lambda x: jnp.moveaxis(_cut(x, 1, CHUNK), (1, 3), (0, 2)), xs)


def _by_time(y: Array, time: int) -> Array:
    """(chunks, batch, heads, step, features) as (batch, time, heads, features)."""
    y = jnp.moveaxis(y, (0, 2), (1, 3))
    return y.reshape(y.shape[0], -1, *y.shape[3:])[:, :time]
