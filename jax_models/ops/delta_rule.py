"""The generalised delta rule: a matrix-valued state with a decay and a rank-one correction."""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int

from jax_models.ops.affine import common_carry_dtype
from jax_models.ops.checks import checked
from jax_models.ops.segments import mask_padding, segments
from jax_models.ops.varying import alike

DeltaRuleMethod = Literal["auto", "chunked", "sequential"]

CHUNK = 16
"""Steps that are computed as products of matrices. Of 64 float32 loses more than torch's loop."""
SEGMENT = 128
"""Steps of which the backward pass keeps the first state, and computes the rest again."""
GONE = -1e5
"""A log decay whose exponential is zero in every dtype. A smaller one counts as this."""
LARGEST_EXPONENT = 40.0
"""Of factors: two of them, and a sum over the keys, stay finite in float32."""


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
            −e^{−1/2}), the chunked form takes one product for what else takes log₂ of them.
        lengths: row b takes only the steps t < lengths[b].
        reset: the first steps of packed documents, where the state restarts from zero.
        method: "sequential", a `lax.scan` over the steps; "chunked", 16 steps as products of
            matrices (Yang et al. 2024, arXiv 2406.06484); "auto", sequential below 16 steps
            and for a symbolic number of them. All compute in at least float32, with
            the highest precision on a TPU. The backward pass keeps a state every 128 steps.

    Returns:
        All y (those beyond `lengths` carry no meaning) and the last S, in at least float32.

    Raises:
        TypeError: an array is of another kind of dtype, or b is given without a, or u with them.
        ValueError: a shape is wrong, a length lies outside 0 … time, or there is no such method.

    Source: Peng et al. 2025 (RWKV-7, arXiv 2503.14456); Peng et al. 2024 (RWKV-6, 2404.05892).

    """
    if (a is None) != (b is None):
        raise TypeError("a, b: expected both or neither")
    if a is not None and u is not None:
        raise TypeError("u: expected None where there are a and b, which read the state before")
    batch, time, heads, _ = k.shape
    dtype = common_carry_dtype(*(x for x in (r, log_w, k, v, a, b, state, u) if x is not None))
    if state is None:
        state = jnp.zeros((batch, heads, v.shape[-1], k.shape[-1]), dtype)
    if 0 in v.shape:
        return v.astype(dtype), state.astype(dtype)
    if is_symbolic_dim(time) or (method == "auto" and time < CHUNK):
        method = "sequential"
    arguments = (Steps(r, log_w, k, v, a, b), state, u)
    arguments = jax.tree.map(lambda x: x.astype(dtype), arguments)
    return _compiled(method, min_log_w, *alike((*arguments, lengths, reset)))


class Steps(NamedTuple):
    """What some steps do."""

    r: Array
    log_w: Array
    k: Array
    v: Array
    a: Array | None
    b: Array | None


def _delta_rule(
    method: DeltaRuleMethod, min_log_w: float | None, xs: Steps, state, u, lengths, reset
) -> tuple[Array, Array]:
    _, restart = segments(xs.k.shape[1], lengths, reset)
    xs = xs._replace(log_w=jnp.maximum(xs.log_w, GONE if min_log_w is None else min_log_w))
    xs = jax.tree.map(lambda x: mask_padding(x, lengths), xs)
    form = _sequential if method == "sequential" else partial(_chunked, _split(min_log_w))
    if restart is None:
        return form(u, xs, restart, state)
    xs, state, (faults, fault_at_end) = _apart(xs, state, restart)
    y, last = form(u, xs, restart, state)
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


def _nan_where(faults: Array, x: Array) -> Array:
    return jnp.where(faults.reshape(*faults.shape, *[1] * (x.ndim - faults.ndim)), jnp.nan, x)


def _in_segments(
    run: Callable, xs: tuple[Steps, Array | None], state: Array
) -> tuple[Array, Array]:
    """`run(state, xs) -> (state, y)` over the first axis; the backward pass runs it again."""
    last, y = lax.scan(jax.checkpoint(run, prevent_cse=False), state, xs)
    return y, last


def _sequential(u, xs: Steps, restart, state) -> tuple[Array, Array]:
    """One step after the other."""

    def step(state, x_and_restart):
        x, is_restart = x_and_restart
        if is_restart is not None:
            state = jnp.where(is_restart[:, None, None, None], 0, state)
        after = state * jnp.exp(x.log_w)[..., None, :] + _outer(x.v, x.k)
        if x.a is not None:
            after += _outer(_applied(state, x.a), x.b)
        if u is None:
            return after, _applied(after, x.r)
        return after, _applied(state, x.r) + x.v * jnp.sum(x.r * u[None] * x.k, -1, keepdims=True)

    time = xs.k.shape[1]
    by_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (xs, restart))
    if is_symbolic_dim(time):
        last, y = lax.scan(step, state, by_time)
        return jnp.moveaxis(y, 0, 1), last
    size = min(SEGMENT, time)
    by_segment = jax.tree.map(lambda x: _cut(x, 0, size), by_time)
    y, last = _in_segments(partial(lax.scan, step), by_segment, state)
    return jnp.moveaxis(y.reshape(-1, *y.shape[2:])[:time], 0, 1), last


def _outer(v: Array, k: Array) -> Array:
    return v[..., :, None] * k[..., None, :]


def _applied(state: Array, r: Array) -> Array:
    return jnp.sum(state * r[..., None, :], axis=-1)


def _cut(x: Array, axis: int, size: int) -> Array:
    """Pieces of `size` steps along two axes instead of one, the last one filled up with zeros."""
    time = x.shape[axis]
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, -time % size)
    x = jnp.pad(x, pads)
    return x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])


class Split(NamedTuple):
    """How Σ_{i<j<t} log_w_j, the log decay from step i to step t of a chunk, comes of two factors.

    In a pair of blocks (t in the second of them, i in the first) no sum is positive and no
    exponential overflows: `rows` gives Σ over the steps of the second block before t, `columns` Σ
    over those of the first one behind i. Blocks of 1, 2, 4, … steps make all pairs i < t.
    """

    rows: Float[np.ndarray, "levels chunk chunk"]
    columns: Float[np.ndarray, "levels chunk chunk"]
    pairs: Bool[np.ndarray, "levels chunk chunk"]


STEP = np.arange(CHUNK)
BEFORE = STEP[None, :] < STEP[:, None]
BEHIND = BEFORE.T
SELF = np.eye(CHUNK, dtype=bool)


def _by_blocks() -> Split:
    sizes = 2 ** np.arange(CHUNK.bit_length() - 1)
    block = STEP // sizes[:, None]
    same = block[:, :, None] == block[:, None, :]
    second = (block % 2 == 1)[:, :, None]
    pairs = second & (block[:, :, None] == block[:, None, :] + 1)
    return Split(same & BEFORE, same & BEHIND, pairs)


def _at_once() -> Split:
    """Both sums from the chunk's start, those of the columns with the other sign."""
    return Split(BEFORE[None], -(BEFORE | SELF).astype(int)[None], BEFORE[None])


def _split(min_log_w: float | None) -> Split:
    bounded = min_log_w is not None and -min_log_w * CHUNK <= LARGEST_EXPONENT
    return _at_once() if bounded else _by_blocks()


def _chunked(split: Split, u, xs: Steps, restart, state) -> tuple[Array, Array]:
    """Products of matrices within chunks, of which some are computed together."""
    time = xs.k.shape[1]
    count = min(SEGMENT, time + -time % CHUNK) // CHUNK

    def cut(x):  # (batch, time, …) to (segments, chunks, batch, …, step, features)
        x = jnp.moveaxis(_cut(_cut(x, 1, CHUNK * count), 2, CHUNK), 0, 2)
        return x if x.ndim == 4 else jnp.swapaxes(x, 3, 4)

    y, last = _in_segments(partial(_chunks, u, split), jax.tree.map(cut, (xs, restart)), state)
    y = jnp.moveaxis(jnp.swapaxes(y, 3, 4), 2, 0)
    return y.reshape(y.shape[0], -1, *y.shape[4:])[:, :time], last


def _chunks(u, split: Split, state: Array, given: tuple[Steps, Array | None]):
    """Chunks one after the other, (chunks, batch, heads, step, features): the last state, all y.

    With S₀ at a chunk's start, the log decay before and behind each step and of all steps, and the
    scores A that step t reads of the steps i < t (r of i ≤ t):

        U = (I − A_ab)⁻¹ ((a ⊙ e^before) S₀ᵀ + A_ak V),   U_t = S_{t−1} a_t
        Y = (r ⊙ e^before) S₀ᵀ + A_rb U + A_rk V
        S = S₀ diag(e^all) + Uᵀ (b ⊙ e^behind) + Vᵀ (k ⊙ e^behind)

    where, unless there is a bonus, r reads after its step: r ⊙ w stands for it.
    """
    (r, log_w, k, v, a, b), restart = given
    then = r * jnp.exp(log_w) if u is None else r
    readers, writers, parts = then, k, 1
    if a is not None and b is not None:
        readers, writers, parts = _rows(a, then), _rows(b, k), 2
    own = jnp.sum(
        _rows(*[r if u is None else r * u[None, None, :, None]] * parts) * writers, axis=-1
    )

    before, behind = _sums(BEFORE, log_w), _sums(BEHIND, log_w)
    fade = jnp.exp((before + log_w)[..., -1, :])
    readers_of_start = readers * jnp.exp(_rows(*[before] * parts))
    writers_to_end = writers * jnp.exp(_rows(*[behind] * parts))
    scores = jnp.zeros((), v.dtype)
    for rows, columns, pairs in zip(*split, strict=True):
        rows, columns = (_rows(*[_sums(which, log_w)] * parts) for which in (rows, columns))
        product = _product(readers * jnp.exp(rows), (writers * jnp.exp(columns)).mT)
        scores += _only(np.tile(pairs, (parts, parts)), product)
    if restart is not None:
        document = jnp.tile(jnp.cumsum(restart, axis=-1), parts)[:, :, None]
        of_start, to_end = document == 0, document == document[..., -1:]
        scores = jnp.where(document[..., :, None] == document[..., None, :], scores, 0)
        readers_of_start = jnp.where(of_start[..., None], readers_of_start, 0)
        writers_to_end = jnp.where(to_end[..., None], writers_to_end, 0)
        fade = jnp.where(of_start[..., -1:], fade, 0)
    of_r = scores[..., -CHUNK:, :] + _only(np.tile(SELF, parts), own[..., None, :])

    corrections = None
    if a is not None:
        of_b, of_k = jnp.split(scores[..., :CHUNK, :], 2, axis=-1)
        known = jnp.concatenate([readers_of_start[..., :CHUNK, :], _product(of_k, v)], axis=-1)
        corrections = jnp.split(_product(_inverse(of_b), known), [k.shape[-1]], axis=-1)

    def chunk(state, x):
        fade, writers, v, corrections = x
        if corrections is not None:
            of_start, of_values = corrections
            v = _rows(_product(of_start, state.mT) + of_values, v)
        return state * fade[..., None, :] + _product(v.mT, writers), (state, v)

    last, (start, values) = lax.scan(chunk, state, (fade, writers_to_end, v, corrections))
    y = _product(readers_of_start[..., -CHUNK:, :], start.mT) + _product(of_r, values)
    return last, y


def _inverse(scores: Array) -> Array:
    """(I − scores)⁻¹ of scores that are 0 for i ≥ t: of pairs of blocks, from those of the blocks.

    The powers of the scores, whose sum it is, may be much larger than it.
    """
    inverse = jnp.broadcast_to(jnp.asarray(SELF, scores.dtype), scores.shape)
    for pairs in _by_blocks().pairs:
        between = _only(pairs, scores)
        inverse += _product(_product(inverse, between), inverse)
    return inverse


def _only(pairs: np.ndarray, scores: Array) -> Array:
    """The scores of some pairs of steps, 0 of the others."""
    pairs = pairs[(None,) * (scores.ndim - 2)]
    return jnp.where(pairs, scores, 0)


def _sums(which: np.ndarray, x: Array) -> Array:
    """Sums over some of a chunk's steps: a product with ones and zeros."""
    return _product(jnp.asarray(which, x.dtype), x)


def _rows(*parts: Array) -> Array:
    return jnp.concatenate(parts, axis=-2)


_product = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
"""Of matrices; XLA's CPU backend fails on products of arrays of more than eight axes."""
