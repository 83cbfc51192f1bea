"""RWKV-4's weighted average as an associative scan, of depth O(log T)."""

import jax
import jax.numpy as jnp
from jax import lax

from jax_models.ops.forms import refusal_of_symbolic
from jax_models.ops.linear.wkv.definition import Average, Results, output
from jax_models.ops.linear.wkv.sums import (
    advance,
    broadcast_like,
    clip_to_finite,
    empty_where,
    step_sums,
    step_sums_or_empty,
)


def run(call: Average) -> Results:
    """Computes the sums of all steps by an associative scan."""
    decay, k, v = without_masks(call)
    steps = decay, step_sums_or_empty(k, v)
    start = jax.tree.map(lambda s: s[:, None], call.state)
    sums = lax.associative_scan(_combine, steps, axis=1)
    _, after = _combine((jnp.zeros_like(start.max), start), sums)
    before = jax.tree.map(lambda s, a: jnp.concatenate([s, a[:, :-1]], axis=1), start, after)
    if call.rows.reset is not None:
        before = empty_where(call.rows.reset[..., None], before)
    now = step_sums(*call.keys_and_values())
    results = output(call.u, before, now, with_sums=call.with_sums)
    return results, jax.tree.map(lambda s: s[:, -1], after)


def refusal(call: Average) -> str | None:
    """Returns why there is no associative scan for the call, or None if there is one."""
    return refusal_of_symbolic(call.k.shape[1])


def without_masks(call: Average):
    """Returns decays, keys and values with which padding adds nothing and a reset forgets all."""
    k, v = call.keys_and_values()
    decay = broadcast_like(call.w, k[:1])
    if call.rows.active is not None:
        active = call.rows.active[..., None]
        decay = jnp.where(active, decay, 0)
        k, v = jnp.where(active, k, -jnp.inf), jnp.where(active, v, 0)
    if call.rows.reset is not None:
        decay = jnp.where(call.rows.reset[..., None], jnp.inf, decay)
    return decay, k, v


def _combine(first, second):
    """Combines two runs of steps. A decay of ∞ forgets all that was before."""
    (x_decay, x), (y_decay, y) = first, second
    x = empty_where(y_decay == jnp.inf, x)
    forgets = (x_decay == jnp.inf) | (y_decay == jnp.inf)
    decay = jnp.where(forgets, jnp.inf, clip_to_finite(x_decay + y_decay))
    return decay, advance(y_decay, x, y)
