"""A chunk of the gated delta rule whose key features decay separately, with its gradient.

This is Kimi Delta Attention. The score of the steps i ≤ t, Σ_d q_td D_tid k_id, has a decay D_ti of
its own for each feature d, so it is no product of one matrix of queries and one of keys. But let t
be in the second and i in the first of two neighboring blocks of steps. There D_ti is the decay from
the start of the second block to t, times the decay from i to the end of the first block, and the
scores of the two blocks are one matrix product. Blocks of 1, 2, 4, … steps cover all pairs of
steps. No decay is divided by another, so no exponential overflows, however strong the decays are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_models.ops.affine import einsum, product, row_sums
from jax_models.ops.delta.inverse import inverse_of_steps, step_and_other
from jax_models.ops.linear_map import linear_map


class Chunk(NamedTuple):
    """The steps of a chunk and the state before it, or their gradients."""

    q: Float[Array, "batch heads step key"]
    k: Float[Array, "batch heads step key"]
    v: Float[Array, "batch heads step value"]
    log_w: Float[Array, "batch heads step key"]
    beta: Float[Array, "batch heads step 1"]
    state: Float[Array, "batch heads value key"]


class Blocks(NamedTuple):
    """Pairs of neighboring blocks of the same size."""

    decays: Float[Array, "batch heads step key"]
    """For a step in a second block, the decay from the start of its block. For a step in a first
    block, the decay to the end of its block.
    """
    readers: Float[Array, "batch heads pair 2*block key"]
    """The decayed queries and then the decayed keys of each second block."""
    writers: Float[Array, "batch heads pair block key"]
    """The decayed keys of each first block."""


class Parts(NamedTuple):
    """What both the results and the gradients of a chunk are computed from."""

    blocks: list[Blocks]
    """For blocks of 1, 2, 4, … steps."""
    from_start: Float[Array, "batch heads step key"]
    """e_t, the decay of the steps up to t."""
    to_end: Float[Array, "batch heads step key"]
    """f_i, the decay of the steps after i."""
    fade: Float[Array, "batch heads 1 key"]
    """Π w, the decay of all steps."""
    scores_of_q: Float[Array, "batch heads step step"]
    scores_of_k: Float[Array, "batch heads step step"]
    """The scores of i ≤ t for queries, and of i < t for keys."""
    inverse: Float[Array, "batch heads step step"]
    """(I + β A)⁻¹ for the scores A of the keys."""
    readers: Float[Array, "batch heads 2*step key"]
    """q_t ⊙ e_t of all steps, and then k_t ⊙ e_t."""
    writers: Float[Array, "batch heads step key"]
    """k_i ⊙ f_i."""
    found: Float[Array, "batch heads step value"]
    """S₀ (q_t ⊙ e_t)."""
    missing: Float[Array, "batch heads step value"]
    """v_t − S₀ (k_t ⊙ e_t)."""
    u: Float[Array, "batch heads step value"]


@jax.custom_jvp
def run_chunk(chunk: Chunk) -> tuple[Array, Array]:
    """Computes the state after a chunk, and its outputs.

        u_t + β_t Σ_{i<t} (Σ_d k_td D_tid k_id) u_i = β_t (v_t − S₀ (k_t ⊙ e_t))
        y_t = S₀ (q_t ⊙ e_t) + Σ_{i≤t} (Σ_d q_td D_tid k_id) u_i
        S = S₀ diag(Π w) + Σ_i u_i (k_i ⊙ f_i)ᵀ

    S₀ is the state before the chunk, and D_ti is the decay of the steps i + 1 … t.
    """
    return _run(chunk)


@run_chunk.defjvp
def _run_chunk_jvp(primals, tangents):
    (chunk,), (moved,) = primals, tangents
    return _run(chunk), linear_map(_tangents, _gradients, chunk, moved)


def _run(chunk: Chunk) -> tuple[Array, Array]:
    parts = _parts(chunk)
    y = parts.found + product(parts.scores_of_q, parts.u)
    return chunk.state * parts.fade + einsum("bhiv,bhik->bhvk", parts.u, parts.writers), y


def _parts(chunk: Chunk) -> Parts:
    q, k, v, log_w, beta, state = chunk
    size = k.shape[-2]
    *by_level, from_start, to_end = jnp.moveaxis(_decays(log_w), 2, 0)
    blocks = [_decayed_blocks(q, k, decays, 1 << level) for level, decays in enumerate(by_level)]
    scores = _assembled_scores(
        row_sums(q * k),
        [einsum("bhntk,bhnik->bhnti", each.readers, each.writers) for each in blocks],
    )
    scores_of_q, scores_of_k = scores[:, :, 0], scores[:, :, 1]
    inverse = inverse_of_steps(-beta * scores_of_k)
    # Queries and keys are stacked, so that one product reads the state for both.
    readers = _stacked(q * from_start, k * from_start)
    found = einsum("bhtk,bhvk->bhtv", readers, state)
    missing = v - found[:, :, size:]
    return Parts(
        blocks=blocks,
        from_start=from_start,
        to_end=to_end,
        fade=jnp.exp(jnp.sum(log_w, axis=-2, keepdims=True)),
        scores_of_q=scores_of_q,
        scores_of_k=scores_of_k,
        inverse=inverse,
        readers=readers,
        writers=k * to_end,
        found=found[:, :, :size],
        missing=missing,
        u=product(inverse, beta * missing),
    )


def _tangents(chunk: Chunk, moved: Chunk):
    return jax.jvp(_run, (chunk,), (moved,))[1]


def _gradients(chunk: Chunk, gradients) -> Chunk:
    """Computes the gradients of a chunk from those of its results, dS and dy.

        du_i = Σ_{t≥i} P_ti dy_t + dS (k_i ⊙ f_i),   dx = (I + β A)⁻ᵀ du,   dv = β dx
        dP = dy uᵀ,   dA = −β dx uᵀ,   dβ = dx ⊙ missing − (dx uᵀ) ⊙ A, summed over the last axis
        dS₀ = dS diag(Π w) + Σ_t (dy_t (q_t ⊙ e_t)ᵀ − dv_t (k_t ⊙ e_t)ᵀ)

    P are the scores of the queries, and A those of the keys. q and k receive a gradient through
    each decay that they are multiplied by, and the logarithm of this decay receives
    q ⊙ dq + k ⊙ dk of these gradients. No term is computed as a difference of others, so a strong
    decay costs no digits.
    """
    q, k, _, _, beta, state = chunk
    d_after, d_y = gradients
    parts, size = _parts(chunk), k.shape[-2]

    d_u = product(parts.scores_of_q.mT, d_y) + einsum("bhik,bhvk->bhiv", parts.writers, d_after)
    d_x = product(parts.inverse.mT, d_u)
    d_v = beta * d_x
    of_inverse = product(d_x, parts.u.mT) * parts.scores_of_k
    d_beta = row_sums(d_x * parts.missing) - row_sums(of_inverse)
    of_readers = _stacked(d_y, -d_v)
    d_scores = product(of_readers, parts.u.mT)
    d_state = d_after * parts.fade + einsum("bhtv,bhtk->bhvk", of_readers, parts.readers)

    # The gradients through each decay: those between blocks, from the start, and to the end.
    levels = zip(parts.blocks, _split_scores(d_scores), strict=True)
    through = [_gradients_of_blocks(blocks, scores) for blocks, scores in levels]
    d_readers = product(of_readers, state)
    d_q, d_k = (x * parts.from_start for x in (d_readers[:, :, :size], d_readers[:, :, size:]))
    through.append((d_q, d_k))
    through.append((jnp.zeros_like(q), product(parts.u, d_after) * parts.to_end))
    d_log_decays = jnp.concatenate([q * d_q + k * d_k for d_q, d_k in through], axis=-2)
    d_log_w = product(_sum_matrix(size, q.dtype).mT, d_log_decays)
    d_log_w += parts.fade * jnp.sum(state * d_after, axis=-2, keepdims=True)

    own = jnp.diagonal(d_scores[:, :, :size], axis1=-2, axis2=-1)[..., None]
    d_q = sum((d_q for d_q, _ in through), start=own * k)
    d_k = sum((d_k for _, d_k in through), start=own * q)
    return Chunk(d_q, d_k, d_v, d_log_w, d_beta, d_state)


def _sum_matrix(size: int, dtype) -> Array:
    """The matrix of zeros and ones that sums log decays: a row for each decay of each step.

    First come those within blocks of 1, 2, 4, … steps, then those from the start of the chunk and
    those to its end. Each sum of log decays has only the terms that it needs.
    """
    t, i = step_and_other(size)

    def within(level: int) -> Array:
        second = (t >> level) & 1 == 1
        return (t >> level == i >> level) & jnp.where(second, i <= t, i > t)

    levels = [within(level) for level in range(size.bit_length() - 1)]
    return jnp.concatenate([*levels, i <= t, i > t]).astype(dtype)


def _decays(log_w: Array) -> Float[Array, "batch heads decay step key"]:
    batch, heads, size, keys = log_w.shape
    decays = jnp.exp(product(_sum_matrix(size, log_w.dtype), log_w))
    return decays.reshape(batch, heads, -1, size, keys)


def _stacked(x: Array, y: Array) -> Array:
    return jnp.concatenate([x, y], axis=-2)


def _by_block(x: Array, size: int) -> tuple[Array, Array]:
    """Returns the first and the second block of each pair: (batch, heads, pair, size, key)."""
    pairs = x.reshape(*x.shape[:2], -1, 2, size, x.shape[-1])
    return pairs[:, :, :, 0], pairs[:, :, :, 1]


def _decayed_blocks(q: Array, k: Array, decays: Array, size: int) -> Blocks:
    of_first, of_second = _by_block(decays, size)
    (_, q), (writers, k) = _by_block(q, size), _by_block(k, size)
    return Blocks(decays, _stacked(q * of_second, k * of_second), writers * of_first)


def _gradients_of_blocks(blocks: Blocks, d_scores: Array) -> tuple[Array, Array]:
    """Returns the gradients of q and k through the decays within blocks."""
    size = blocks.writers.shape[-2]
    of_first, of_second = _by_block(blocks.decays, size)
    d_readers = product(d_scores, blocks.writers)
    d_writers = product(d_scores.mT, blocks.readers) * of_first
    d_q, d_k = (x * of_second for x in (d_readers[..., :size, :], d_readers[..., size:, :]))
    pairs = jnp.stack([jnp.zeros_like(d_q), d_q], axis=3), jnp.stack([d_writers, d_k], axis=3)
    d_q, d_k = (x.reshape(blocks.decays.shape) for x in pairs)
    return d_q, d_k


def _assembled_scores(own: Array, between: list[Array]) -> Float[Array, "batch heads 2 step step"]:
    """Puts together the scores of queries and keys, from those of all pairs of blocks.

    `own` are the scores of each query and the key of its own step. Those of keys do not count.
    """
    scores = jnp.stack([own, jnp.zeros_like(own)], axis=3)[..., None]
    for across in between:
        across = across.reshape(*across.shape[:3], 2, -1, across.shape[-1])
        first, second = scores[:, :, 0::2], scores[:, :, 1::2]
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        scores = _stacked(upper, jnp.concatenate([across, second], axis=-1))
    return scores[:, :, 0]


def _split_scores(scores: Float[Array, "batch heads 2*step step"]) -> list[Array]:
    """Takes the scores of all pairs of blocks out of those of queries and keys."""
    batch, heads, _, size = scores.shape
    scores, between = scores.reshape(batch, heads, 1, 2, size, size), []
    while size > 1:
        size //= 2
        between.insert(0, scores[..., size:, :size].reshape(batch, heads, -1, 2 * size, size))
        halves = jnp.stack([scores[..., :size, :size], scores[..., size:, size:]], axis=3)
        scores = halves.reshape(batch, heads, -1, 2, size, size)
    return between
