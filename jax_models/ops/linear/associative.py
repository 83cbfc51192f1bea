"""The diagonal linear recurrence as an associative scan, of depth O(log T)."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_models.ops.forms import refusal_of_symbolic
from jax_models.ops.linear.definition import Recurrence, advance


def run(call: Recurrence) -> Array:
    """Combines the steps in pairs, then the pairs in pairs, and so on."""
    call = call.without_masks()
    a, b = call.a.astype(call.h0.dtype), call.b.astype(call.h0.dtype)
    # The associative scan runs in one direction, so factors are shifted and time is reversed around
    # it.
    if call.shifted:
        first = jnp.zeros_like(a[:, :1])  # not the factor at the other end, which may be NaN
        parts = [a[:, 1:], first] if call.reverse else [first, a[:, :-1]]
        a = jnp.concatenate(parts, axis=1)
    if call.reverse:
        a, b = jnp.flip(a, axis=1), jnp.flip(b, axis=1)
    h = scan(a, b, call.h0)
    return jnp.flip(h, axis=1) if call.reverse else h


def scan(a, b, h0) -> Array:
    """Runs `h_t = a_t ⊙ h_{t−1} + b_t` forwards."""
    first = advance(a[:, :1], h0[:, None], b[:, :1])
    b = jnp.concatenate([first, b[:, 1:]], axis=1)  # includes h0, so only b is needed below
    return lax.associative_scan(_combine, (a, b), axis=1)[1]


def _combine(first, second):
    """Combines two steps into one: `h ↦ a₂ (a₁ h + b₁) + b₂`."""
    (a1, b1), (a2, b2) = first, second
    return advance(a2, a1, 0), advance(a2, b1, b2)


def refusal(call: Recurrence) -> str | None:
    """Returns why there is no associative scan for the call, or None if there is one."""
    return refusal_of_symbolic(call.a.shape[1])
