"""The scan or the expression that you would write first, for each operator."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def over_time(step: Callable, state: Any, xs: Any) -> jax.Array:
    """`lax.scan` over arrays (batch, time, …)."""
    by_time = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), xs)
    return jnp.swapaxes(jax.lax.scan(step, state, by_time)[1], 0, 1)


def in_pieces(step: Callable, state: Any, xs: Any, pieces: int) -> jax.Array:
    """The same, but the backward pass keeps only the states at the ends of so many pieces."""

    @jax.checkpoint
    def piece(state, xs):
        return jax.lax.scan(step, state, xs)

    by_piece = jax.tree.map(
        lambda x: jnp.swapaxes(x, 0, 1).reshape(pieces, -1, x.shape[0], *x.shape[2:]), xs
    )
    ys = jax.lax.scan(piece, state, by_piece)[1]
    return jnp.swapaxes(ys.reshape(-1, *ys.shape[2:]), 0, 1)


def zeros(x: jax.Array, *features: int) -> jax.Array:
    """The state of each row of x before the first step."""
    return jnp.zeros((x.shape[0], *features), x.dtype)


def plain_delta_rule(r, log_w, k, v, a, b):
    """`S_t = S_{t−1} (diag(w_t) + a_t b_tᵀ) + v_t k_tᵀ`, `y_t = S_t r_t`."""

    def step(s, x):
        r, log_w, k, v, a, b = x
        read = jnp.einsum("bhij,bhj->bhi", s, a)
        s = s * jnp.exp(log_w)[..., None, :] + read[..., None] * b[..., None, :]
        s = s + v[..., None] * k[..., None, :]
        return s, jnp.einsum("bhij,bhj->bhi", s, r)

    return over_time(step, zeros(k, k.shape[2], *k.shape[3:] * 2), (r, log_w, k, v, a, b))


def gated_delta_step(s, x):
    """`S_t = w_t S_{t−1} + β_t (v_t − w_t S_{t−1} k_t) k_tᵀ`, `y_t = S_t q_t`."""
    q, k, v, log_w, rate = x
    s = s * jnp.exp(log_w)[..., None, None]
    error = v - jnp.einsum("bhvk,bhk->bhv", s, k)
    s = s + jnp.einsum("bhv,bhk->bhvk", rate[..., None] * error, k)
    return s, jnp.einsum("bhvk,bhk->bhv", s, q)


def plain_wkv6(r, log_w, k, v, u):
    """`y_t = (S_{t−1} + v_t (u ⊙ k_t)ᵀ) r_t`, `S_t = S_{t−1} diag(w_t) + v_t k_tᵀ`."""

    def step(s, x):
        r, log_w, k, v = x
        now = v[..., None] * k[..., None, :]
        y = jnp.einsum("bhij,bhj->bhi", s + u[..., None, :] * now, r)
        return s * jnp.exp(log_w)[..., None, :] + now, y

    return over_time(step, zeros(k, k.shape[2], *k.shape[3:] * 2), (r, log_w, k, v))
