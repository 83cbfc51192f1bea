"""The form "chunked" of the gated delta rule, which computes 32 or 64 steps at a time."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_models.ops.affine import einsum, product
from jax_models.ops.delta import by_feature, chunked
from jax_models.ops.delta.calls import GatedDeltaRule, Results, by_head
from jax_models.ops.delta.decays import Decays
from jax_models.ops.delta.inverse import inverse_of_steps, step_and_other
from jax_models.ops.delta.uncorrected import Chunk, run_chunk
from jax_models.ops.forms import known_size
from jax_models.ops.linear_map import linear_map
from jax_models.ops.shard_map_axes import match_varying_axes

CHUNK = 64
"""The number of steps of a chunk, which are computed by matrix products."""
UNCORRECTED_CHUNK = 32
"""The number of steps of a chunk without a correction. On a CPU, chunks of 64 steps took 1.3 to 1.4
times as long on 28 November 2026, when the gradient was JAX's.
"""
BY_FEATURE_CHUNK = 32
"""The number of steps of a chunk if the features of a key decay separately."""
SHORTEST = 16
"""The smallest number of steps of a chunk. In a short sequence, a chunk has a power of two of
steps, at least this many.
"""
FEW_STEPS = 8
"""With fewer steps, one after the other is faster than a chunk, as measured on a CPU."""
CACHE = 2**19
"""A size in bytes. A CPU reads and writes a larger state slowly in each step."""
FIRST_CACHE = 2**15
"""The size in bytes of the first cache of a core, for the same reason."""


def refusal(call: GatedDeltaRule) -> str | None:
    """Returns why chunks do not support the call, or None if they do."""
    if call.steps.beta is None and call.decays_by_feature:
        return "a decay for each feature of a key needs a beta"
    return chunked.refusal(call)


def pays(call: GatedDeltaRule, platform: str, differentiated: bool) -> bool:
    """Whether chunks are likely to be faster than one step after the other.

    On a CPU, the forward pass alone is faster step by step while the state stays in a cache. Chunks
    without a correction need the fewest matrix products, so the whole state must exceed the last
    cache of a core there. With a correction, the state of one head must exceed the first cache.
    """
    if call.steps.k.shape[1] < FEW_STEPS:
        return False
    if platform != "cpu" or differentiated:
        return True
    size = call.state.dtype.itemsize
    if call.steps.beta is None:
        return known_size(*call.state.shape) * size > CACHE
    *_, values, keys = call.state.shape
    return values * keys * size > FIRST_CACHE and not call.decays_by_feature


def run(call: GatedDeltaRule) -> Results:
    """Runs the chunks one after the other."""
    call = call.without_reset()
    time = call.steps.k.shape[1]
    pad = [(0, 0), (0, -time % _size(call)), (0, 0), (0, 0)]
    steps = jax.tree.map(lambda x: jnp.pad(x, pad), call.steps)
    y, last = _chunks(dataclasses.replace(call, steps=steps))
    return y[:, :time], last


@jax.custom_jvp
def _chunks(call: GatedDeltaRule) -> Results:
    return _run(call, keep=False)[:2]


@_chunks.defjvp
def _chunks_jvp(primals, tangents):
    """Stores the state before each chunk, and computes the rest of the chunk again."""
    (call,), (moved,) = primals, tangents
    y, last, before = _run(call, keep=True)
    return (y, last), linear_map(_tangents, _gradients, (call, before), moved)


def _run(call: GatedDeltaRule, *, keep: bool):
    def one(carry, n):
        state, y = carry
        after, found = _chunk(_of_chunk(call, state, n))
        return (after, _into_chunk(y, found, n)), state if keep else None

    start = call.state, jnp.zeros(call.steps.v.shape, call.state.dtype)
    (last, y), before = lax.scan(one, match_varying_axes((start, call))[0], _indices(call))
    return y, last, before


def _tangents(residuals, moved: GatedDeltaRule):
    call, before = residuals

    def one(carry, n):
        d_state, d_y = carry
        primals, tangents = _of_chunk(call, before[n], n), _of_chunk(moved, d_state, n)
        _, (d_state, found) = jax.jvp(_chunk, (primals,), (tangents,))
        return (d_state, _into_chunk(d_y, found, n)), None

    start = moved.state, jnp.zeros(moved.steps.v.shape, moved.state.dtype)
    (d_last, d_y), _ = lax.scan(one, match_varying_axes((start, moved))[0], _indices(call))
    return d_y, d_last


def _gradients(residuals, gradients):
    (call, before), (d_y, d_last) = residuals, gradients

    def one(carry, n):
        d_state, d_steps = carry
        _, pull_back = jax.vjp(_chunk, _of_chunk(call, before[n], n))
        (found,) = pull_back((d_state, _slice(d_y, n, _size(call))))
        d_steps = jax.tree.map(partial(_into_chunk, n=n), d_steps, found.steps)
        return (found.state, d_steps), None

    start = d_last, jax.tree.map(jnp.zeros_like, call.steps)
    start = match_varying_axes((start, call, d_y))[0]
    (d_state, d_steps), _ = lax.scan(one, start, _indices(call), reverse=True)
    return dataclasses.replace(call, steps=d_steps, state=d_state)


def _chunk(call: GatedDeltaRule) -> tuple[Array, Array]:
    """Computes a chunk by matrix products, and returns the state after it and its outputs."""
    if call.decays_by_feature:
        steps = by_head(call.prepared(call.steps))
        steps = (jnp.moveaxis(x, 1, 2) for x in steps if x is not None)
        after, y = by_feature.run_chunk(by_feature.Chunk(*steps, state=call.state))
        return after, jnp.moveaxis(y, 1, 2)
    q, k, v, log_w, beta = call.prepared(call.steps)
    batch, steps, key_heads, _ = k.shape
    by_key_head = batch, steps, key_heads, -1
    chunk = Chunk(
        q=jnp.moveaxis(q, 1, 2),
        k=jnp.moveaxis(k, 1, 2),
        v=jnp.moveaxis(v.reshape(*by_key_head, v.shape[-1]), 1, 2),
        log_w=jnp.moveaxis(log_w.reshape(*by_key_head, 1), 1, 3),
        state=call.state.reshape(batch, key_heads, -1, *call.state.shape[2:]),
    )
    if beta is None:
        after, y = run_chunk(chunk)
    else:
        after, y = _corrected(chunk, jnp.moveaxis(beta.reshape(*by_key_head, 1), 1, 3))
    return after.reshape(call.state.shape), jnp.moveaxis(y, 2, 1).reshape(call.steps.v.shape)


def _corrected(chunk: Chunk, beta: Array) -> tuple[Array, Array]:
    """Computes a chunk whose values are corrected by what the state holds under their keys.

    S₀ is the state before the chunk, and D_ti, e_t and f_i are those of `Decays`. Each step adds
    u_t k_tᵀ to the decayed state:

        u_t + β_t Σ_{i<t} D_ti (k_tᵀ k_i) u_i = β_t (v_t − e_t S₀ k_t)
        y_t = e_t S₀ q_t + Σ_{i≤t} D_ti (q_tᵀ k_i) u_i
        S = S₀ Π α + Σ_i f_i u_i k_iᵀ

    The heads of a key head read the same queries and keys, so one product computes q_tᵀ k_i and
    k_tᵀ k_i for all of them.
    """
    q, k, v, log_w, state = chunk
    size, decays = k.shape[-2], Decays.of(log_w)
    # Queries and keys are stacked: one product reads the keys for both, and one the state.
    readers = jnp.concatenate([q, k], axis=-2)
    scores_of_q, scores_of_k = _halves(einsum("bgtk,bgik->bgti", readers, k), size)
    found_by_q, found_by_k = _halves(einsum("bgtk,bghvk->bghtv", readers, state), size)
    t, i = step_and_other(size)
    earlier = jnp.where(i < t, decays.between * scores_of_k[:, :, None], 0)
    v = jnp.swapaxes(v, 2, 3)
    u = _solve(-beta * earlier, beta * (v - decays.from_start * found_by_k))
    y = decays.from_start * found_by_q + product(decays.between * scores_of_q[:, :, None], u)
    after = state * decays.fade + einsum("bghiv,bgik->bghvk", decays.to_end * u, k)
    return after, jnp.swapaxes(y, 2, 3)


def _halves(x: Array, size: int) -> tuple[Array, Array]:
    """Splits the results of queries and keys that are stacked."""
    return x[..., :size, :], x[..., size:, :]


def _of_chunk(call: GatedDeltaRule, state: Array, n) -> GatedDeltaRule:
    """Returns the call of chunk n, which starts from the state."""
    steps = jax.tree.map(partial(_slice, n=n, size=_size(call)), call.steps)
    return dataclasses.replace(call, steps=steps, state=state)


@jax.custom_jvp
def _solve(scores: Array, x: Array) -> Array:
    """Solves (I − A) u = x for scores A that are 0 if i ≥ t."""
    return product(inverse_of_steps(scores), x)


@_solve.defjvp
def _solve_jvp(primals, tangents):
    (scores, x), (d_scores, d_x) = primals, tangents
    inverse = inverse_of_steps(scores)
    u = product(inverse, x)
    return u, product(inverse, d_x + product(d_scores, u))


def _indices(call: GatedDeltaRule) -> Array:
    return jnp.arange(call.steps.k.shape[1] // _size(call))


def _size(call: GatedDeltaRule) -> int:
    """Returns the number of steps of a chunk."""
    longest = UNCORRECTED_CHUNK if call.steps.beta is None else CHUNK
    if call.decays_by_feature:
        longest = BY_FEATURE_CHUNK
    return min(longest, max(SHORTEST, 1 << (call.steps.k.shape[1] - 1).bit_length()))


def _slice(x: Array, n, size: int) -> Array:
    return lax.dynamic_slice_in_dim(x, n * size, size, axis=1)


def _into_chunk(x: Array, found: Array, n) -> Array:
    return lax.dynamic_update_slice_in_dim(x, found, n * found.shape[1], axis=1)
