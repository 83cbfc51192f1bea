"""The form "chunked" of the gated delta rule, which computes 64 steps at a time."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_models.ops.affine import einsum, product
from jax_models.ops.delta.calls import GatedDeltaRule, GatedSteps, Results, by_head
from jax_models.ops.delta.inverse import inverse_of_steps, step_and_other
from jax_models.ops.linear_map import linear_map
from jax_models.ops.shard_map_axes import match_varying_axes

CHUNK = 64
"""The number of steps that are computed by matrix products."""
SHORTEST = 16
"""The chunk of a short sequence has a power of two of steps, at least this many."""


FEW_STEPS = 8
"""With fewer steps, one after the other is faster than a chunk, as measured on a CPU."""


def pays(call: GatedDeltaRule, platform: str, differentiated: bool) -> bool:
    """Whether chunks are likely to be faster than one step after the other."""
    return call.steps.k.shape[1] >= FEW_STEPS


def run(call: GatedDeltaRule) -> Results:
    """Runs the chunks one after the other."""
    call = call.without_reset()
    time = call.steps.k.shape[1]
    size = min(CHUNK, max(SHORTEST, 1 << (time - 1).bit_length()))
    pad = [(0, 0), (0, -time % size), (0, 0), (0, 0)]
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
        (found,) = pull_back((d_state, _slice(d_y, n)))
        d_steps = jax.tree.map(partial(_into_chunk, n=n), d_steps, found.steps)
        return (found.state, d_steps), None

    start = d_last, jax.tree.map(jnp.zeros_like, call.steps)
    start = match_varying_axes((start, call, d_y))[0]
    (d_state, d_steps), _ = lax.scan(one, start, _indices(call), reverse=True)
    return dataclasses.replace(call, steps=d_steps, state=d_state)


def _chunk(call: GatedDeltaRule) -> tuple[Array, Array]:
    """Runs a chunk, and returns the state after it and its outputs."""
    steps = call.prepared(call.steps)
    if steps.beta is None:
        return uncorrected_chunk(call.state, steps)
    steps = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 2), by_head(steps))
    after, y = corrected_chunk(call.state, *steps)
    return after, jnp.moveaxis(y, 1, 2)


def _of_chunk(call: GatedDeltaRule, state: Array, n) -> GatedDeltaRule:
    """Returns the call of chunk n, which starts from the state."""
    steps = jax.tree.map(partial(_slice, n=n), call.steps)
    return dataclasses.replace(call, steps=steps, state=state)


def corrected_chunk(
    state: Array, q: Array, k: Array, v: Array, log_decay: Array, beta: Array
) -> tuple[Array, Array]:
    """Computes a chunk, (batch, heads, step, features), by matrix products.

    S₀ is the state before the chunk. D_ti is the product of the decays α of the steps i + 1 … t,
    e_t that of the steps up to t, and f_i that of the steps after i. Each step adds u_t k_tᵀ to the
    decayed state:

        u_t + β_t Σ_{i<t} D_ti (k_tᵀ k_i) u_i = β_t (v_t − e_t S₀ k_t)
        y_t = e_t S₀ q_t + Σ_{i≤t} D_ti (q_tᵀ k_i) u_i
        S = S₀ Π α + Σ_i f_i u_i k_iᵀ

    Each sum of log decays has only the terms that it needs, as a product with ones and zeros, so
    that a strong decay costs the other steps no digits, and no exponential overflows.
    """
    size = k.shape[-2]
    t, i = step_and_other(size)
    until = (i <= t).astype(k.dtype)
    decays = jnp.exp(product(until, jnp.where(t > i, log_decay, 0)))
    of_start, to_end = (jnp.exp(product(x, log_decay)) for x in (until, 1 - until))
    # Queries and keys are stacked: one product reads the keys for both, and one the state.
    readers = jnp.concatenate([q, k], axis=-2)
    scores = einsum("...tk,...ik->...ti", readers, k)
    of_q, of_k = (scores[..., at, :] * decays for at in (slice(size), slice(size, None)))
    found = einsum("...tk,...vk->...tv", readers, state)
    found_by_q, found_by_k = found[..., :size, :], found[..., size:, :]
    earlier = -beta * jnp.where(i < t, of_k, 0)
    u = _solve(earlier, beta * (v - of_start * found_by_k))
    fade = jnp.exp(jnp.sum(log_decay, axis=-2, keepdims=True))
    after = state * fade + einsum("...tv,...tk->...vk", u, to_end * k)
    return after, of_start * found_by_q + product(jnp.where(i <= t, of_q, 0), u)


def uncorrected_chunk(state: Array, xs: GatedSteps) -> tuple[Array, Array]:
    """Computes a chunk, (batch, step, heads, features), of which each step adds v_t k_tᵀ.

        y_t = e_t S₀ q_t + Σ_{i≤t} D_ti (q_tᵀ k_i) v_i
        S = S₀ Π α + Σ_i f_i v_i k_iᵀ

    The symbols and the sums are those of `corrected_chunk`. The heads of a key head read the same
    queries and keys, so one product computes q_tᵀ k_i for all of them, and one product reads all
    their states.
    """
    q, k, v, log_decay, _ = xs
    batch, size, key_heads, keys = k.shape
    t, i = step_and_other(size)
    until = (i <= t).astype(k.dtype)
    by_head = jnp.moveaxis(log_decay, 1, 2)
    decays = jnp.where(i <= t, jnp.exp(product(until, jnp.where(t > i, by_head, 0))), 0)
    of_start, to_end = (
        jnp.exp(einsum("ti,bihx->bthx", steps, log_decay)) for steps in (until, 1 - until)
    )
    # The outputs: what the queries read from the state before the chunk, and from its own steps.
    scores = einsum("btgk,bigk->bgti", q, k)
    of_steps = decays.reshape(batch, key_heads, -1, size, size) * scores[:, :, None]
    found = einsum("btgk,bgvk->btgv", q, state.reshape(batch, key_heads, -1, keys))
    y = of_start * found.reshape(v.shape)
    y += einsum("bhti,bihv->bthv", of_steps.reshape(decays.shape), v)
    # The state after the chunk.
    learned = einsum("btgv,btgk->bgvk", (to_end * v).reshape(batch, size, key_heads, -1), k)
    fade = jnp.exp(jnp.sum(by_head, axis=2, keepdims=True))
    return state * fade + learned.reshape(state.shape), y


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
    return jnp.arange(call.steps.k.shape[1] // _size(call.steps.k))


def _size(x: Array) -> int:
    return min(CHUNK, x.shape[1])


def _slice(x: Array, n) -> Array:
    return lax.dynamic_slice_in_dim(x, n * _size(x), _size(x), axis=1)


def _into_chunk(x: Array, found: Array, n) -> Array:
    return lax.dynamic_update_slice_in_dim(x, found, n * _size(x), axis=1)
