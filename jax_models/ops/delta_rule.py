"""The generalized delta rule: a matrix-valued state with a decay and a rank-one correction."""

from functools import partial
from typing import Literal, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim
from jaxtyping import Array, Float

from jax_models.checks.arguments import checked
from jax_models.ops.affine import common_carry_dtype
from jax_models.ops.by_platform import by_platform
from jax_models.ops.delta_rule_chunk import CHUNK, Chunk, across, is_bounded
from jax_models.ops.delta_rule_rows import LOWEST_LOG_DECAY, isolated, run_rows
from jax_models.ops.delta_rule_steps import (
    Steps,
    by_chunk,
    by_segment,
    by_time,
    in_segments,
    sequential,
    split_axis,
)
from jax_models.ops.rows import DividedMasks, Rows, given_rows

DeltaRuleMethod = Literal["auto", "chunked", "sequential"]

CHUNKS = 8
"""The backward pass stores one state every 8 chunks and recomputes the others."""


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

    The following layers are special cases. r is their query times its scale. Each step and head has
    a decay α and a rate β:

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
        min_log_w: a lower bound, to which a smaller log_w is raised. If it is near 0 (RWKV-7's is
            −e^{−1/2}) and there is no `reset`, chunks need one matrix product instead of four.
        method: "sequential" runs one step after the other; "chunked" computes 16 steps at a time by
            matrix products (Yang et al. 2024, arXiv 2406.06484). "auto" is sequential on a CPU or
            with fewer than 16 steps, and chunked otherwise. With a symbolic number of steps, every
            method is sequential. All methods compute in at least float32, with the highest
            precision on a TPU. For the backward pass, "sequential" stores √time states, or all of
            them if they take at most 4 MiB, and "chunked" stores one every 128 steps. Unless the
            method is sequential or `reset` is given, a NaN also reaches the outputs of up to 15
            steps before it.
        **masks: `lengths`, `reset` and `time_axis`, as in `DividedMasks`. At a `reset`, the state
            restarts from zero. With a `time_axis`, the steps of a device turn S into `S M + E`. The
            devices exchange M and E, so that each can compute the S before its own steps and run
            from there.

    Returns:
        All y and the last S, in at least float32. Each y beyond `lengths` is meaningless.

    Raises:
        NotImplementedError: `lengths` are given with a `time_axis`.
        TypeError: the dtype of an array is of another kind, only one of a and b is given, or u is
            given together with a and b.
        ValueError: a shape is wrong, a length lies outside 0 … time, min_log_w is positive, or
            there is no such method.

    Source: Peng et al. 2025 (RWKV-7, arXiv 2503.14456); Peng et al. 2024 (RWKV-6, 2404.05892).

    """
    # Check the combinations of arguments that the annotations do not cover.
    rows = given_rows(masks)
    if (a is None) != (b is None):
        raise TypeError("a, b: expected both or neither")
    if a is not None and u is not None:
        raise TypeError("u: expected None where there are a and b, which read the state before")
    if min_log_w is not None and min_log_w > 0:
        raise ValueError(f"min_log_w: expected at most 0, got {min_log_w}")
    # Compute in the widest dtype of the arguments, and leave early if there is nothing to compute.
    batch, time, heads, _ = k.shape
    dtype = common_carry_dtype(*(x for x in (r, log_w, k, v, a, b, state, u) if x is not None))
    if state is None:
        state = jnp.zeros((batch, heads, v.shape[-1], k.shape[-1]), dtype)
    if 0 in v.shape or 0 in k.shape:
        return jnp.zeros(v.shape, dtype), state.astype(dtype)
    # Chunks need a known number of steps, and are slower for fewer steps than one chunk has.
    if is_symbolic_dim(time) or (method == "auto" and time < CHUNK):
        method = "sequential"
    steps = jax.tree.map(lambda x: x.astype(dtype), Steps(r, log_w, k, v, a, b))
    state, u = state.astype(dtype), u if u is None else u.astype(dtype)
    return run_rows(partial(_compiled, method, min_log_w), steps, state, rows, u)


@partial(jax.jit, static_argnums=(0, 1))  # else eager calls would compile the scan each time
def _compiled(
    method: DeltaRuleMethod, min_log_w: float | None, xs: Steps, state, rows: Rows, u
) -> tuple[Array, Array]:
    restart = rows.reset
    least = LOWEST_LOG_DECAY if min_log_w is None else min_log_w
    xs = xs._replace(log_w=jnp.where(xs.log_w < least, least, xs.log_w))
    xs = jax.tree.map(rows.masked, xs)
    chunk = Chunk(reads_after=u is None, bounded=is_bounded(min_log_w) and restart is None)
    return isolated(partial(_with_bonus, method, chunk, u, restart), xs, state, restart)


def _with_bonus(
    method: DeltaRuleMethod, chunk: Chunk, u, restart: Array | None, xs: Steps, state: Array
) -> tuple[Array, Array]:
    """Returns all y and the last S. At a restart, a step ignores the state before it."""
    r = xs.r
    if restart is not None:
        restart = restart[..., None, None]
        xs = xs._replace(log_w=jnp.where(restart, LOWEST_LOG_DECAY, xs.log_w))
        if xs.a is not None:
            xs = xs._replace(a=jnp.where(restart, 0, xs.a))
        if not chunk.reads_after:
            xs = xs._replace(r=jnp.where(restart, 0, xs.r))
    if method == "auto":
        y, last = _fastest(chunk, xs, state)
    elif method == "sequential":
        y, last = sequential(chunk.reads_after, xs, state)
    else:
        y, last = _chunked(chunk, xs, state)
    if u is not None:
        y += xs.v * jnp.sum(r * u[None, None] * xs.k, axis=-1, keepdims=True)
    return y, last


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _fastest(chunk: Chunk, xs: Steps, state: Array) -> tuple[Array, Array]:
    """Runs step by step on a CPU, and in chunks elsewhere."""
    return by_platform(
        xs,
        state,
        cpu=partial(sequential, chunk.reads_after),
        default=partial(_chunked, chunk),
    )


@_fastest.defjvp
def _fastest_jvp(chunk: Chunk, primals, tangents):
    """Differentiates without `by_platform`, whose derivative would run the forward pass twice."""

    def run(xs, state):
        forms = {
            "cpu": partial(by_segment, chunk.reads_after),
            "default": partial(_chunked, chunk),
        }
        return lax.platform_dependent(xs, state, **forms)

    return jax.jvp(run, primals, tangents)


def _chunked(chunk: Chunk, xs: Steps, state: Array) -> tuple[Array, Array]:
    """Computes the steps of a chunk by matrix products, for up to `CHUNKS` chunks at once."""
    time = xs.k.shape[1]
    count = min(CHUNKS, -(-time // CHUNK))

    def chunks(state, xs):
        return lax.scan(lambda state, x: across(state, *x), state, chunk.within(*xs))

    by_segment = jax.tree.map(lambda x: split_axis(x, 0, count), by_chunk(xs, CHUNK))
    y, last = in_segments(chunks, by_segment, state)
    return by_time(y.reshape(-1, *y.shape[2:]), time), last
