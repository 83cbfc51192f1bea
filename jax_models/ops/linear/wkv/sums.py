"""Sums of exponentials of any size, stored without a factor `exp(max)`."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

EMPTY_EXPONENT = -1e38
"""The exponent of an empty sum in a `WKVState`."""


class WKVState(NamedTuple):
    """The sums so far, `exp(max) · num` and `exp(max) · den`.

    Empty sums are (0, 0, EMPTY_EXPONENT).
    """

    num: Float[Array, "batch features"]
    den: Float[Array, "batch features"]
    max: Float[Array, "batch features"]


def broadcast_like(x: Float[Array, "..."], like: Float[Array, "*steps features"]):
    return jnp.broadcast_to(x, like.shape)


def add(x: WKVState, y: WKVState) -> WKVState:
    """Adds two pairs of scaled sums. The result has the larger of their exponents."""
    difference = x.max - y.max
    smaller = jnp.exp(-jnp.abs(difference))
    of_x = jnp.where(difference > 0, 1, smaller)
    of_y = jnp.where(difference > 0, smaller, 1)
    return WKVState(
        of_x * x.num + of_y * y.num, of_x * x.den + of_y * y.den, jnp.maximum(x.max, y.max)
    )


def empty_where(condition: Bool[Array, "..."], sums: WKVState) -> WKVState:
    """Replaces the sums with empty ones where the condition holds."""
    empty = (0.0, 0.0, -jnp.inf)  # stays below all others, even after decay
    return WKVState(*(jnp.where(condition, e, s) for e, s in zip(empty, sums, strict=True)))


def advance(decay, before: WKVState, now: WKVState) -> WKVState:
    """Computes `exp(−decay) S + step`."""
    return add(decayed(before, decay), now)


def decayed(sums: WKVState, decay) -> WKVState:
    return sums._replace(max=jnp.minimum(sums.max - decay, largest_number(sums.max.dtype)))


def largest_number(dtype) -> float:
    return float(jnp.finfo(dtype).max)


def clip_to_finite(x):
    """Clips a sum of exponents that overflows to the dtype's largest number or its negative."""
    return jnp.clip(x, -largest_number(x.dtype), largest_number(x.dtype))


def step_sums(k, v) -> WKVState:
    """The contribution of a step to the sums."""
    return WKVState(v, jnp.ones_like(v), k)


def step_sums_or_empty(k, v) -> WKVState:
    """The contribution of a step to the sums, which is empty where k is −∞, as in padding."""
    nothing = k == -jnp.inf
    return WKVState(
        jnp.where(nothing, 0, v), jnp.where(nothing, 0.0, jnp.ones_like(v)), clip_to_finite(k)
    )
