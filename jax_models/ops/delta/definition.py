"""The delta rules as their equations: scans over time of a matrix S for each head."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim
from jaxtyping import Array

from jax_models.ops.affine import einsum
from jax_models.ops.delta.calls import DeltaRule, GatedDeltaRule, Results, by_head

FEW_STATES = 2**22
"""A size in bytes. If all states take no more than this, storing beats recomputing them."""


def delta_rule(call: DeltaRule) -> Results:
    """Computes `S_t = S_{t−1} (diag(w_t) + a_t b_tᵀ) + v_t k_tᵀ` and `y_t = S_t r_t`.

    With u, `y_t = (S_{t−1} + v_t (u ⊙ k_t)ᵀ) r_t`.
    """

    def step(S, now):
        (r, w, k, v, a, b), restart = now
        S = _restarted(S, restart)
        learned = _outer(v, k)
        after = S * w[..., None, :] + learned
        if a is not None:
            after += _outer(_read(S, a), b)
        return after, _read(after if call.u is None else S + call.u[None, :, None] * learned, r)

    steps = call.steps._replace(log_w=jnp.exp(call.steps.log_w))
    return over_time(step, call.state, (steps, call.reset))


def gated_delta_rule(call: GatedDeltaRule) -> Results:
    """Computes `S_t = S_{t−1} diag(α_t) + u_t k_tᵀ` and `y_t = S_t q_t`.

    u_t = β_t (v_t − S_{t−1} diag(α_t) k_t), or v_t if there is no β.
    """

    def step(S, now):
        (q, k, v, alpha, beta), restart = now
        S = _restarted(S, restart) * alpha[..., None, :]
        u = v if beta is None else beta * (v - _read(S, k))
        S += _outer(u, k)
        return S, _read(S, q)

    steps = by_head(call.prepared(call.steps))
    steps = steps._replace(log_w=jnp.exp(steps.log_w))
    return over_time(step, call.state, (steps, call.reset))


def _restarted(S: Array, restart: Array | None) -> Array:
    return S if restart is None else jnp.where(restart[:, None, None, None], 0, S)


def _read(S: Array, k: Array) -> Array:
    return einsum("bhvk,bhk->bhv", S, k)


def _outer(v: Array, k: Array) -> Array:
    return v[..., :, None] * k[..., None, :]


def over_time(step: Callable, state: Array, xs: Any) -> tuple[Array, Array]:
    """Calls `step(state, x) -> (state, y)` for each step of xs, and returns all y and the last S.

    If all states take more than `FEW_STATES`, the backward pass stores only the state before each
    of √time segments, and computes the states within a segment again.
    """
    xs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), xs)
    scan, time = partial(lax.scan, step), jax.tree.leaves(xs)[0].shape[0]
    states = time * state.size * state.dtype.itemsize
    few = not is_symbolic_dim(states) and states <= FEW_STATES
    if is_symbolic_dim(time) or few:
        last, y = scan(state, xs)
        return jnp.moveaxis(y, 0, 1), last
    size = math.isqrt(time)
    whole = time // size * size
    segments = jax.tree.map(lambda x: x[:whole].reshape(-1, size, *x.shape[1:]), xs)
    state, y = lax.scan(jax.checkpoint(scan, prevent_cse=False), state, segments)
    last, rest = scan(state, jax.tree.map(lambda x: x[whole:], xs))
    return jnp.moveaxis(jnp.concatenate([y.reshape(whole, *y.shape[2:]), rest]), 0, 1), last
