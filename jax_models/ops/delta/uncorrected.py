"""A chunk of the gated delta rule without a correction, with its gradient.

The axes are ordered for XLA's CPU backend, which computes a product fastest if each operand has one
axis for rows and one for columns. So heads and values are merged into one axis, that of the rows of
each product with the state.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_models.ops.affine import einsum, product, row_sums
from jax_models.ops.delta.decays import Decays, exponentials, log_sums
from jax_models.ops.linear_map import linear_map


class Chunk(NamedTuple):
    """The steps of a chunk and the state before it, or their gradients."""

    q: Float[Array, "batch key_heads step key"]
    k: Float[Array, "batch key_heads step key"]
    v: Float[Array, "batch key_heads step heads value"]
    log_w: Float[Array, "batch key_heads heads step 1"]
    state: Float[Array, "batch key_heads heads value key"]


@jax.custom_jvp
def run_chunk(chunk: Chunk) -> tuple[Array, Array]:
    """Computes the state after a chunk, and its outputs.

        y_t = e_t S₀ q_t + Σ_{i≤t} D_ti (q_tᵀ k_i) v_i
        S = S₀ Π α + Σ_i f_i v_i k_iᵀ

    S₀ is the state before the chunk, and D_ti, e_t and f_i are those of `Decays`.
    """
    return _run(chunk)


@run_chunk.defjvp
def _run_chunk_jvp(primals, tangents):
    (chunk,), (moved,) = primals, tangents
    return _run(chunk), linear_map(_tangents, _gradients, chunk, moved)


def _run(chunk: Chunk) -> tuple[Array, Array]:
    q, k, v, log_w, state = chunk
    decays = Decays.of(log_w)
    scores = einsum("bgtk,bgik->bgti", q, k)[:, :, None]
    found_before = _swap(decays.from_start) * _read(state, q)
    y = found_before + _swap(product(decays.between * scores, _swap(v)))
    after = state * decays.fade + _write(_swap(decays.to_end) * v, k)
    return after, y


def _tangents(chunk: Chunk, moved: Chunk):
    return jax.jvp(_run, (chunk,), (moved,))[1]


def _gradients(chunk: Chunk, gradients) -> Chunk:
    """Computes the gradients of a chunk from those of its results, dS and dy.

        dv_i = Σ_{t≥i} D_ti (q_tᵀ k_i) dy_t + f_i dS k_i
        dq_t = Σ_{i≤t} c_ti k_i + e_t S₀ᵀ dy_t,   c_ti = D_ti (dy_tᵀ v_i)
        dk_i = Σ_{t≥i} c_ti q_t + f_i dSᵀ v_i
        dS₀ = dS Π α + Σ_t e_t dy_t q_tᵀ

    dq and dk are sums over the heads of a key head.
    The gradient of the logarithm of a decay is that of the decay, times the decay. The log decays
    of the steps receive the gradients of the sums that they are in. No term is computed as a
    difference of others, so a strong decay costs no digits.
    """
    q, k, v, log_w, state = chunk
    d_after, d_y = gradients
    sums, gradient_of_sums = jax.vjp(log_sums, log_w)
    decays = exponentials(sums)
    from_start, to_end = _swap(decays.from_start), _swap(decays.to_end)

    scores = einsum("bgtk,bgik->bgti", q, k)[:, :, None]
    decayed = decays.between * product(_swap(d_y), _swap(v).mT)
    d_scores = jnp.sum(decayed, axis=2)
    read, written = from_start * d_y, to_end * v
    of_written = to_end * _read(d_after, k)
    d_v = _swap(product((decays.between * scores).mT, _swap(d_y))) + of_written
    d_q = product(d_scores, k) + _read_values(state, read)
    d_k = product(d_scores.mT, q) + _read_values(d_after, written)
    d_state = d_after * decays.fade + _write(read, q)

    d_sums = Decays(
        between=decayed * scores,
        from_start=_swap(row_sums(read * _read(state, q))),
        to_end=_swap(row_sums(of_written * v)),
        fade=decays.fade * jnp.sum(row_sums(d_after * state), axis=-2, keepdims=True),
    )
    (d_log_w,) = gradient_of_sums(d_sums)
    return Chunk(d_q, d_k, d_v, d_log_w, d_state)


def _swap(x: Array) -> Array:
    """Exchanges the axes of heads and steps."""
    return jnp.swapaxes(x, 2, 3)


def _read(state: Array, q: Array) -> Array:
    """Computes S q_t for each step: (batch, key_heads, step, heads, value)."""
    batch, key_heads, heads, values, keys = state.shape
    rows = state.reshape(batch, key_heads, heads * values, keys)
    found = einsum("bgrk,bgtk->bgrt", rows, q).mT
    return found.reshape(batch, key_heads, -1, heads, values)


def _read_values(state: Array, v: Array) -> Array:
    """Computes Sᵀ v_t for each step, summed over heads: (batch, key_heads, step, key)."""
    batch, key_heads, heads, values, keys = state.shape
    rows = state.reshape(batch, key_heads, heads * values, keys)
    return product(v.reshape(batch, key_heads, -1, heads * values), rows)


def _write(v: Array, k: Array) -> Array:
    """Computes Σ_t v_t k_tᵀ for each head: (batch, key_heads, heads, value, key)."""
    batch, key_heads, steps, heads, values = v.shape
    columns = v.reshape(batch, key_heads, steps, heads * values).mT
    return product(columns, k).reshape(batch, key_heads, heads, values, -1)
