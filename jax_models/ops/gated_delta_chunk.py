"""Chunks of the gated delta rule as matrix products, and a scan over the chunks."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_models.ops.affine import einsum, product
from jax_models.ops.inverse_of_steps import inverse_of_steps, step_and_other
from jax_models.ops.l2_normalize import l2_normalize
from jax_models.ops.linear_map import linear_map
from jax_models.ops.shard_map_axes import match_varying_axes

CHUNK = 64
"""The number of steps that are computed by matrix products."""
SHORTEST = 16
"""The chunk of a short sequence has a power of two of steps, at least this many."""


class GatedSteps(NamedTuple):
    """The arrays of `gated_delta_rule` that have a value for each step.

    The log decays and the rates have a last axis of size 1.
    """

    q: Array
    k: Array
    v: Array
    log_decay: Array
    beta: Array | None
    """None: what the state holds under a key is not corrected."""


class KeyOptions(NamedTuple):
    """How queries and keys are prepared, chunk by chunk, so that no prepared copy is stored."""

    normalize: bool
    scale: float

    def __call__(self, xs: GatedSteps, dtype) -> GatedSteps:
        """Casts the steps to the dtype of the state, and normalizes and scales queries and keys."""
        xs = jax.tree.map(lambda x: x.astype(dtype), xs)
        q, k = (l2_normalize(xs.q), l2_normalize(xs.k)) if self.normalize else (xs.q, xs.k)
        return xs._replace(q=self.scale * q, k=k)


def repeat_keys(xs: GatedSteps, axis: int) -> GatedSteps:
    """Repeats queries and keys for all heads that they serve. `axis` is the axis of the heads."""
    served = xs.v.shape[axis] // xs.k.shape[axis]
    q, k = (jnp.repeat(x, served, axis=axis) for x in (xs.q, xs.k))
    return xs._replace(q=q, k=k)


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


def chunked(keys: KeyOptions, xs: GatedSteps, state: Array) -> tuple[Array, Array]:
    """Runs the chunks one after the other, and returns all y and the last state."""
    time = xs.k.shape[1]
    size = min(CHUNK, max(SHORTEST, 1 << (time - 1).bit_length()))
    pad = [(0, 0), (0, -time % size), (0, 0), (0, 0)]
    y, last = _chunks(keys, jax.tree.map(lambda x: jnp.pad(x, pad), xs), state)
    return y[:, :time], last


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _chunks(keys: KeyOptions, xs: GatedSteps, state: Array) -> tuple[Array, Array]:
    return _run(keys, xs, state, keep=False)[:2]


@_chunks.defjvp
def _chunks_jvp(keys: KeyOptions, primals, tangents):
    """Stores the state before each chunk, and computes the rest of the chunk again."""
    xs, state = primals
    y, last, before = _run(keys, xs, state, keep=True)
    return (y, last), linear_map(_tangents, _gradients, (xs, before), tangents, keys)


def _run(keys: KeyOptions, xs: GatedSteps, state: Array, *, keep: bool):
    def one(carry, n):
        state, y = carry
        after, found = _chunk(keys, state, _of_chunk(xs, n))
        return (after, _into_chunk(y, found, n)), state if keep else None

    start = state, jnp.zeros(xs.v.shape, state.dtype)
    (last, y), before = lax.scan(one, match_varying_axes((start, xs))[0], _indices(xs))
    return y, last, before


def _tangents(keys: KeyOptions, residuals, tangents):
    (xs, before), (d_xs, d_state) = residuals, tangents

    def one(carry, n):
        d_state, d_y = carry
        primals, moved = (before[n], _of_chunk(xs, n)), (d_state, _of_chunk(d_xs, n))
        _, (d_state, found) = jax.jvp(partial(_chunk, keys), primals, moved)
        return (d_state, _into_chunk(d_y, found, n)), None

    start = d_state, jnp.zeros(xs.v.shape, d_state.dtype)
    (d_last, d_y), _ = lax.scan(one, match_varying_axes((start, d_xs))[0], _indices(xs))
    return d_y, d_last


def _gradients(keys: KeyOptions, residuals, gradients):
    (xs, before), (d_y, d_last) = residuals, gradients

    def one(carry, n):
        d_state, d_xs = carry
        _, pullback = jax.vjp(partial(_chunk, keys), before[n], _of_chunk(xs, n))
        d_state, found = pullback((d_state, _of_chunk(d_y, n)))
        return (d_state, jax.tree.map(partial(_into_chunk, n=n), d_xs, found)), None

    start = d_last, jax.tree.map(jnp.zeros_like, xs)
    start = match_varying_axes((start, xs, d_y))[0]
    (d_state, d_xs), _ = lax.scan(one, start, _indices(xs), reverse=True)
    return d_xs, d_state


def _chunk(keys: KeyOptions, state: Array, xs: GatedSteps) -> tuple[Array, Array]:
    """Runs a chunk of arrays (batch, step, heads, features)."""
    xs = keys(xs, state.dtype)
    if xs.beta is None:
        return uncorrected_chunk(state, xs)
    xs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 2), repeat_keys(xs, axis=2))
    after, y = corrected_chunk(state, *jax.tree.leaves(xs))
    return after, jnp.moveaxis(y, 1, 2)


def _size(x: Array) -> int:
    return min(CHUNK, x.shape[1])


def _indices(xs: GatedSteps) -> Array:
    return jnp.arange(xs.k.shape[1] // _size(xs.k))


def _of_chunk(xs, n):
    def slice_chunk(x):
        return lax.dynamic_slice_in_dim(x, n * _size(x), _size(x), axis=1)

    return jax.tree.map(slice_chunk, xs)


def _into_chunk(x: Array, found: Array, n) -> Array:
    return lax.dynamic_update_slice_in_dim(x, found, n * _size(x), axis=1)
