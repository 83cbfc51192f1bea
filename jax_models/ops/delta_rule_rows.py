"""Keeps documents apart and divides time over devices, for both delta rules."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from jax_models.ops.rows import Rows
from jax_models.ops.shard_map_axes import match_varying_axes
from jax_models.ops.time_axis import states_between

LOWEST_LOG_DECAY = -1e5
"""A log decay whose exponential is zero in every dtype.

Lower log decays, such as −∞, are raised to it.
"""


def isolated(
    run: Callable[[Any, Array], tuple[Array, Array]],
    xs: Any,
    state: Array,
    restart: Bool[Array, "batch time"] | None,
) -> tuple[Array, Array]:
    """Calls `run(xs, state)` so that documents stay apart even if arguments are not finite.

    No NaN or infinity of the arguments passes from one document to the next. A step that restarts
    multiplies the state by zero, and zero times NaN is NaN. So the steps and states that are not
    finite become zero, and every later result of the document becomes NaN.

    Args:
        run: returns y and the last state.
        xs: arrays (batch, time, heads, features), whose number of heads may be a divisor of the
            state's.
        state: the state before the first step.
        restart: the steps at which `run` ignores the state before the step. None: there are none.

    """
    if restart is None:
        return run(xs, state)
    heads = state.shape[1]
    finite = [jnp.isfinite(x).all(axis=-1) for x in jax.tree.leaves(xs)]
    finite = jnp.stack([jnp.repeat(x, heads // x.shape[2], axis=2) for x in finite]).all(axis=0)
    start = jnp.isfinite(state).all(axis=(-2, -1))
    y, last = run(*jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), (xs, state)))
    step = jnp.arange(restart.shape[1])[None]
    # The latest step that is not finite, and the first step of the current document; −1 if none.
    latest = lax.cummax(jnp.where(finite, -1, step[..., None]), axis=1)
    begun = lax.cummax(jnp.where(restart, step, -1), axis=1)[..., None]
    faults = jnp.where(begun < 0, (latest >= 0) | ~start[:, None], latest >= begun)
    return _nan_where(faults, y), _nan_where(faults[:, -1], last)


def _nan_where(faults: Array, x: Array) -> Array:
    return jnp.where(faults.reshape(*faults.shape, *[1] * (x.ndim - faults.ndim)), jnp.nan, x)


def run_rows(
    compiled: Callable[..., tuple[Array, Array]], xs: Any, start: Array, rows: Rows, *others: Any
) -> tuple[Array, Array]:
    """Runs `compiled(xs, state, rows, *others)`, which returns y and the last state.

    If time is divided over devices, each device runs its own steps from the state before them, and
    the last state is that of all devices. The steps of a device turn S into S M + E. One run
    computes both E and M: E is the last state of a run from zero, and M that of a run from the
    identity without values.
    """

    def run(xs, state):
        return compiled(*match_varying_axes((xs, state, rows, *others)))

    if rows.time_axis is None:
        return run(xs, start)
    batch, heads, values, keys = start.shape
    no_values = jnp.zeros((*xs.v.shape[:-1], keys), xs.v.dtype)
    identity = jnp.broadcast_to(jnp.eye(keys, dtype=start.dtype), (batch, heads, keys, keys))
    _, end = run(
        xs._replace(v=jnp.concatenate([xs.v, no_values], axis=-1)),
        jnp.concatenate([jnp.zeros_like(start), identity], axis=-2),
    )

    restarts = jnp.zeros(batch, bool) if rows.reset is None else rows.reset.any(axis=1)

    def after(steps, state):
        end, restarts = steps
        E, M = jnp.split(end, [values], axis=-2)
        state = jnp.where(restarts[:, None, None, None], 0, state)  # M is zero, and 0 · NaN is NaN
        return jnp.matmul(state, M, precision="highest") + E

    before, last = states_between(after, (end, restarts), start, rows.time_axis)
    return run(xs, before)[0], last
