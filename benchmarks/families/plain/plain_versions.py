"""The scan or the expression that you would write first, for each operator."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def over_time(step: Callable, state: Any, xs: Any) -> jax.Array:
    """`lax.scan` over arrays (batch, time, …)."""
    by_time = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), xs)
    return jnp.swapaxes(jax.lax.scan(step, state, by_time)[1], 0, 1)


def zeros(x: jax.Array, *features: int) -> jax.Array:
    """The state of each row of x before the first step."""
    return jnp.zeros((x.shape[0], *features), x.dtype)


def plain_wkv(k, v, w, u):
    """The average with a running maximum of the exponents, as in RWKV's own code."""

    def step(state, x):
        (num, den, largest), (k, v) = state, x
        q = jnp.maximum(largest, u + k)
        past, now = jnp.exp(largest - q), jnp.exp(u + k - q)
        y = (past * num + now * v) / (past * den + now)
        q = jnp.maximum(largest - w, k)
        past, now = jnp.exp(largest - w - q), jnp.exp(k - q)
        return (past * num + now * v, past * den + now, q), y

    empty = zeros(k, k.shape[2])
    return over_time(step, (empty, empty, empty - 1e38), (k, v))


def plain_linear_recurrence(a, b):
    """`h_t = a_t ⊙ h_{t−1} + b_t`."""

    def step(h, x):
        a, b = x
        h = a * h + b
        return h, h

    return over_time(step, zeros(b, b.shape[2]), (a, b))


def plain_min_gru(x, kernel, bias):
    """`h_t = (1 − z_t) ⊙ h_{t−1} + z_t ⊙ h̃_t`."""
    gate, candidate = jnp.split(x @ kernel + bias, 2, axis=-1)
    z = jax.nn.sigmoid(gate)
    return plain_linear_recurrence(1 - z, z * candidate)


def plain_min_lstm(x, kernel, bias):
    """`h_t = f'_t ⊙ h_{t−1} + i'_t ⊙ h̃_t`, the gates divided by their sum."""
    f, i, candidate = jnp.split(x @ kernel + bias, 3, axis=-1)
    f, i = jax.nn.sigmoid(f), jax.nn.sigmoid(i)
    return plain_linear_recurrence(f / (f + i), i / (f + i) * candidate)


def plain_modal_conv(v, poles, residues, skip):
    """`s_t = λ ⊙ s_{t−1} + v_t`, `y_t = Re Σ_n R_n s_{t,n} + skip ⊙ v_t`."""
    poles, residues = (jax.lax.complex(a[..., 0], a[..., 1]) for a in (poles, residues))

    def step(s, v):
        s = poles * s + v[..., None]
        return s, (residues * s).real.sum(axis=-1) + skip * v

    return over_time(step, zeros(v, *poles.shape).astype(poles.dtype), v)


def plain_local_attention(q, k, v, window):
    """JAX's attention over the same keys."""
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=True, local_window_size=(window.size - 1, 0)
    )
