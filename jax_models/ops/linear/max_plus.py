"""The max-plus recurrence: a linear recurrence with max in place of + and + in place of ·."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim
from jaxtyping import Array, Float

from jax_models.ops.rows import Rows, steps_first
from jax_models.ops.shard_map_axes import match_varying_axes
from jax_models.ops.time_axis import states_between

Step = tuple[Array, Array]
"""The a and b of the function `m ↦ max(a + m, b)`, which forgets m if a is −∞."""


def max_plus(
    a: Float[Array, "batch time heads"],
    b: Float[Array, "batch time heads"],
    m: Float[Array, "batch heads"],
    rows: Rows,
) -> tuple[
    Float[Array, "batch time heads"],
    Float[Array, "batch time heads"],
    Float[Array, "batch heads"],
]:
    """Runs `m_t = max(a_t + m_{t−1}, b_t)`, and returns all m_{t−1}, all m_t and the last m.

    At a reset, m_{t−1} is zero. Steps in the padding leave m unchanged. The form is an associative
    scan, of depth O(log T), unless the number of steps is symbolic.
    """
    # A restart forgets m as if it were 0, and padding adds 0 to it.
    if rows.reset is not None:
        restart = rows.reset[..., None]
        a, b = jnp.where(restart, -jnp.inf, a), jnp.where(restart, jnp.maximum(a, b), b)
    if rows.active is not None:
        active = rows.active[..., None]
        a, b = jnp.where(active, a, 0), jnp.where(active, b, -jnp.inf)
    steps, m = match_varying_axes((_joined((a, b)), m))
    end = None
    if rows.time_axis is not None:
        of_device = jax.tree.map(lambda x: x[:, -1], steps)
        m, end = states_between(_advance, of_device, m, rows.time_axis)
    m = jnp.concatenate([m[:, None], _advance(steps, m[:, None])], axis=1)
    before, after = m[:, :-1], m[:, 1:]
    if rows.reset is not None:
        before = jnp.where(rows.reset[..., None], 0, before)
    return before, after, m[:, -1] if end is None else end


def _joined(steps: Step) -> Step:
    """Joins each step with all steps before it."""
    if not is_symbolic_dim(steps[0].shape[1]):
        return lax.associative_scan(_join, steps, axis=1)
    none = jnp.zeros_like(steps[0][:, 0]), jnp.full_like(steps[1][:, 0], -jnp.inf)
    _, joined = lax.scan(_join_twice, none, steps_first(steps))
    return steps_first(joined)


def _join_twice(first: Step, second: Step) -> tuple[Step, Step]:
    joined = _join(first, second)
    return joined, joined


def _join(first: Step, second: Step) -> Step:
    return _plus(second[0], first[0]), _advance(second, first[1])


def _advance(step: Step, m: Array) -> Array:
    return jnp.maximum(_plus(step[0], m), step[1])


def _plus(a: Array, m: Array) -> Array:
    """`a + m`, or −∞ if a is −∞, even if m is NaN."""
    return jnp.where(a == -jnp.inf, a, a + m)
