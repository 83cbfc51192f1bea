"""The selective scan of Mamba, a diagonal state space whose steps depend on its inputs."""

import dataclasses
from typing import Annotated, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_models.checks.arguments import checked
from jax_models.ops.affine import common_carry_dtype
from jax_models.ops.forms import NATIVE, Form, Operator
from jax_models.ops.linear.definition import advance
from jax_models.ops.linear.selective_scan import chunked, definition
from jax_models.ops.linear.selective_scan.definition import SelectiveScan, Steps
from jax_models.ops.rows import DividedMasks, Rows, given_rows
from jax_models.ops.shard_map_axes import match_varying_axes
from jax_models.ops.time_axis import states_between

SELECTIVE_SCAN = Operator(
    "selective_scan",
    (
        Form("chunked", chunked.run, refusal=chunked.refusal, pays=chunked.pays),
        Form("definition", definition.scan),
    ),
    (NATIVE,),
)

SelectiveScanMethod = Annotated[str, "auto or the name of a form"]
"""What runs a selective scan."""


@checked()
def selective_scan(
    u: Float[Array, "batch time features"],
    dt: Float[Array, "batch time features"],
    A: Float[Array, "features state"],
    B: Float[Array, "batch time state"],
    C: Float[Array, "batch time state"],
    state: Float[Array, "batch features state"] | None = None,
    *,
    method: SelectiveScanMethod = "auto",
    **masks: Unpack[DividedMasks],
) -> tuple[Float[Array, "batch time features"], Float[Array, "batch features state"]]:
    """Runs the selective scan of Mamba, which keeps a vector for each feature.

        >>> u, dt = jnp.ones((2, 8, 100, 64))
        >>> B, C = jnp.ones((2, 8, 100, 16))
        >>> y, state = selective_scan(u, dt, -jnp.ones((64, 16)), B, C)

        h_t = exp(Δ_t A) ⊙ h_{t−1} + (Δ_t ⊙ u_t) B_tᵀ
        y_t = h_t C_t

    Every number of the state decays at its own rate, unlike in Mamba-2, whose rates are the same
    for all numbers of a head (`gated_delta_rule`).

    Args:
        u: the inputs.
        dt: Δ, the size of each step, at least 0.
        A: the rates at which the state decays, at most 0.
        B: the keys under which the inputs are stored.
        C: the keys with which the state is read.
        state: h before the first step. None: zero.
        method: the form that runs. "definition" is a plain `lax.scan`, whose backward pass stores
            all states. "chunked" stores one state for each chunk of at most 32 steps, and computes
            the others again. "native" is the package `twinscan-native`, which runs on CPUs and
            stores one state every 16 steps. "auto" chooses the form that is likely to be the
            fastest for the call: "native" from 16 steps on, in float32 and on a single CPU device;
            otherwise "chunked" if a derivative is computed and the number of steps is not symbolic,
            and "definition" if not. `ops.forms_of` shows the choice.
        **masks: `lengths`, `reset` and `time_axis`, or `rows`, as in `DividedMasks`. At a `reset`,
            the state restarts from zero. With a `time_axis`, each device runs its steps twice: once
            from zero, and once from the state after the devices before it.

    Returns:
        All y and the last h, in at least float32. Each y beyond `lengths` is meaningless.

    Raises:
        NotImplementedError: `lengths` are given with a `time_axis`, or the form that `method` names
            does not support the call. "chunked" takes no symbolic number of steps.
        TypeError: the dtype of an array is of another kind.
        ValueError: a shape is wrong, a length lies outside 0 … time, or there is no such method.

    Source: Gu and Dao 2023 (Mamba, arXiv 2312.00752).

    """
    rows = given_rows(masks)
    arrays = [x for x in (u, dt, A, B, C, state) if x is not None]
    dtype = common_carry_dtype(*arrays)
    if state is None:
        state = jnp.zeros((u.shape[0], *A.shape), dtype)
    if 0 in u.shape or 0 in A.shape:
        return jnp.zeros(u.shape, dtype), state.astype(dtype)
    steps = jax.tree.map(lambda x: rows.masked(x.astype(dtype)), Steps(u, dt, B, C))
    h = jnp.swapaxes(state.astype(dtype), 1, 2)
    call = SelectiveScan(steps, A.astype(dtype).T, h, rows.reset)
    y, last = _run(match_varying_axes(call), rows, method)
    return y, jnp.swapaxes(last, 1, 2)


def _run(call: SelectiveScan, rows: Rows, method: str) -> definition.Results:
    """Runs a form. If time is divided over devices, they exchange how their steps change h."""
    if rows.time_axis is None:
        return SELECTIVE_SCAN(call, method)
    from_zero = dataclasses.replace(call, h=jnp.zeros_like(call.h))
    _, own = SELECTIVE_SCAN(match_varying_axes(from_zero), method)
    kept = definition.kept(call.A, call.steps.dt.sum(axis=1))
    if rows.reset is not None:
        kept = jnp.where(rows.reset.any(axis=1)[:, None, None], 0, kept)
    before, last = states_between(
        lambda steps, h: advance(steps[0], h, steps[1]), (kept, own), call.h, rows.time_axis
    )
    call = match_varying_axes(dataclasses.replace(call, h=before))
    return SELECTIVE_SCAN(call, method)[0], last
