"""Keeps documents apart and divides time over devices, for both delta rules."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_models.ops.delta.calls import DeltaRule, GatedDeltaRule, Results
from jax_models.ops.forms import Operator
from jax_models.ops.rows import Rows
from jax_models.ops.shard_map_axes import match_varying_axes
from jax_models.ops.time_axis import states_between

Call = TypeVar("Call", DeltaRule, GatedDeltaRule)


def run_rows(operator: Operator, method: str, call: DeltaRule | GatedDeltaRule, rows: Rows):
    """Runs a form of an operator, and returns all y and the last S.

    If time is divided over devices, each device runs its own steps from the state before them, and
    the last state is that of all devices. The steps of a device turn S into S M + E. One run
    computes both E and M: E is the last state of a run from zero, and M that of a run from the
    identity without values.
    """
    call, rows = match_varying_axes((call, rows))
    if rows.time_axis is None:
        return _compiled(operator, method, call, rows)
    steps, start = call.steps, call.state
    batch, heads, values, keys = start.shape
    no_values = jnp.zeros((*steps.v.shape[:-1], keys), steps.v.dtype)
    identity = jnp.broadcast_to(jnp.eye(keys, dtype=start.dtype), (batch, heads, keys, keys))
    from_zero_and_identity = dataclasses.replace(
        call,
        steps=steps._replace(v=jnp.concatenate([steps.v, no_values], axis=-1)),
        state=jnp.concatenate([jnp.zeros_like(start), identity], axis=-2),
    )
    from_zero_and_identity = match_varying_axes(from_zero_and_identity)
    _, end = _compiled(operator, method, from_zero_and_identity, rows)

    restarts = jnp.zeros(batch, bool) if rows.reset is None else rows.reset.any(axis=1)

    def after(steps, state):
        end, restarts = steps
        E, M = jnp.split(end, [values], axis=-2)
        state = jnp.where(restarts[:, None, None, None], 0, state)  # M is zero, and 0 · NaN is NaN
        return jnp.matmul(state, M, precision="highest") + E

    before, last = states_between(after, (end, restarts), start, rows.time_axis)
    call = match_varying_axes(dataclasses.replace(call, state=before))
    return _compiled(operator, method, call, rows)[0], last


@partial(jax.jit, static_argnums=(0, 1))  # else eager calls would compile the scan each time
def _compiled(operator: Operator, method: str, call: Call, rows: Rows) -> Results:
    """Raises low log decays, and turns the padding into steps that leave the state unchanged."""
    low = call.steps.log_w < call.min_log_w
    log_w = jnp.where(low, call.min_log_w, call.steps.log_w)
    steps = jax.tree.map(rows.masked, call.steps._replace(log_w=log_w))
    call = dataclasses.replace(call, steps=steps, reset=rows.reset)
    return _isolated(partial(operator, method=method), call)


def _isolated(run: Callable[[Call], Results], call: Call) -> Results:
    """Runs a call so that documents stay apart even if its arrays are not finite.

    No NaN or infinity passes from one document to the next. A step that restarts may multiply the
    state by zero, and zero times NaN is NaN. So the steps and states that are not finite become
    zero, and every later result of the document becomes NaN.
    """
    if call.reset is None:
        return run(call)
    heads = call.state.shape[1]
    finite = [jnp.isfinite(x).all(axis=-1) for x in jax.tree.leaves(call.steps)]
    finite = jnp.stack([jnp.repeat(x, heads // x.shape[2], axis=2) for x in finite]).all(axis=0)
    start = jnp.isfinite(call.state).all(axis=(-2, -1))
    steps, state = jax.tree.map(
        lambda x: jnp.where(jnp.isfinite(x), x, 0), (call.steps, call.state)
    )
    y, last = run(dataclasses.replace(call, steps=steps, state=state))
    step = jnp.arange(call.reset.shape[1])[None]
    # The latest step that is not finite, and the first step of the current document; −1 if none.
    latest = lax.cummax(jnp.where(finite, -1, step[..., None]), axis=1)
    begun = lax.cummax(jnp.where(call.reset, step, -1), axis=1)[..., None]
    faults = jnp.where(begun < 0, (latest >= 0) | ~start[:, None], latest >= begun)
    return _nan_where(faults, y), _nan_where(faults[:, -1], last)


def _nan_where(faults: Array, x: Array) -> Array:
    return jnp.where(faults.reshape(*faults.shape, *[1] * (x.ndim - faults.ndim)), jnp.nan, x)
