"""RWKV-4's weighted average of the past, computed around a running maximum."""

import dataclasses
from typing import Annotated, Unpack

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_models.checks.arguments import checked
from jax_models.checks.values import FloatingDtype, checked_count
from jax_models.ops.affine import carry_dtype, common_carry_dtype
from jax_models.ops.forms import ACCELERATORS, Form, Operator
from jax_models.ops.linear.wkv import associative, definition, sequential
from jax_models.ops.linear.wkv.definition import Average
from jax_models.ops.linear.wkv.derivative import derivative
from jax_models.ops.linear.wkv.pallas import PALLAS
from jax_models.ops.linear.wkv.sums import (
    EMPTY_EXPONENT,
    WKVState,
    advance,
    broadcast_like,
    empty_where,
)
from jax_models.ops.rows import DividedMasks, given_rows
from jax_models.ops.shard_map_axes import match_varying_axes
from jax_models.ops.time_axis import states_between

WKV = Operator(
    "wkv",
    (
        PALLAS,
        Form("associative", associative.run, ACCELERATORS, associative.refusal),
        Form("sequential", sequential.run),
        Form("definition", definition.scan),
    ),
    derivative=derivative,
)

WKVMethod = Annotated[str, "auto or the name of a form"]
"""What runs the average."""


@checked({int: checked_count})
def empty_wkv_state(batch_size: int, features: int, dtype: FloatingDtype) -> WKVState:
    """The state before the first step."""
    return WKVState(*(jnp.full((batch_size, features), x, dtype) for x in (0, 0, EMPTY_EXPONENT)))


@checked()
def wkv(
    k: Float[Array, "batch time features"],
    v: Float[Array, "batch time features"],
    state: WKVState | None = None,
    *,
    w: Float[Array, " features"],
    u: Float[Array, " features"],
    method: WKVMethod = "auto",
    **masks: Unpack[DividedMasks],
) -> tuple[Float[Array, "batch time features"], WKVState]:
    """Averages the v_i so far, with the weights exp(k_i), which decay at the rate w.

        y_t = (N_{t−1} + exp(u + k_t) v_t) / (D_{t−1} + exp(u + k_t))
        N_t = exp(−w) N_{t−1} + exp(k_t) v_t
        D_t = exp(−w) D_{t−1} + exp(k_t)

    N and D are stored as `exp(max) · (num, den)`, where max is the largest exponent in them. So
    exponentials are taken only of numbers ≤ 0, and y is finite for all finite k, w and u. The
    gradient with respect to N and D is a linear recurrence, which is run backwards by the same
    method:

        ∂L/∂N_{t−1} = exp(−w) ∂L/∂N_t + (∂L/∂y_t) / (D_{t−1} + exp(u + k_t))

    ∂L/∂D_{t−1} follows the same equation with −y_t ∂L/∂y_t. Each gradient is scaled by its own max.
    Forward mode consists of linear recurrences, too.

    Args:
        k: the keys.
        v: the values.
        state: the sums before the first step. None: empty.
        w: the decay of a step, `exp(time_decay)` in RWKV-4.
        u: the bonus of the current step, `time_first` in RWKV-4.
        method: the form that runs. "sequential" runs T steps in place. "associative" is
            `jax.lax.associative_scan`, of depth O(log T). "pallas" runs the sequential steps in one
            kernel. "definition" is a plain `lax.scan`, which JAX differentiates. "auto" is
            sequential on a CPU and with a symbolic number of steps, and uses the kernel on a TPU
            and for large arrays on an NVIDIA GPU. Otherwise, and where no kernel works, it is
            associative. `ops.forms_of` shows the choice.
        **masks: `lengths`, `reset` and `time_axis`, or `rows`, as in `DividedMasks`. At a `reset`,
            the sums restart empty. With a `time_axis`, the devices exchange the sums of their
            steps, and each then runs from the sums before its own steps.

    Returns:
        All y and the last state, in at least float32. Each y beyond `lengths` is meaningless.

    Raises:
        NotImplementedError: `lengths` are given with a `time_axis`, or the form that `method` names
            does not support the call. Also when the program is lowered, if "pallas" has no kernel
            for this device, dtype or division over devices.
        TypeError: the dtype of an array is of another kind.
        ValueError: a shape is wrong, a length lies outside 0 … time, or there is no such method.

    Source: Peng et al. 2023 (arXiv 2305.13048), its appendix on numerical stability.

    """
    rows = given_rows(masks)
    batch, _, features = k.shape
    if state is None:
        state = empty_wkv_state(batch, features, carry_dtype(k.dtype))
    dtype = common_carry_dtype(k, v)
    w, u, num, den, max = (x.astype(dtype) for x in (w, u, *state))
    if k.dtype != v.dtype:
        k, v = k.astype(dtype), v.astype(dtype)
    state = WKVState(num, den, max)
    if 0 in k.shape:
        return v.astype(dtype), state
    # Inside, the exponent of empty sums is −∞, which no step can fall below.
    state = state._replace(max=jnp.where(state.den == 0, -jnp.inf, state.max))
    call, last = Average(w, u, k, v, state, dataclasses.replace(rows, time_axis=None)), None
    if rows.time_axis is not None:
        before, last = _device_sums(call, rows.time_axis, method)
        call = dataclasses.replace(call, state=before)
    (y, _), own_last = WKV(match_varying_axes(call), method)
    last = own_last if last is None else last
    return y, last._replace(max=jnp.where(last.den == 0, EMPTY_EXPONENT, last.max))


def _device_sums(call: Average, time_axis: str, method: str) -> tuple[WKVState, WKVState]:
    """Returns the sums before this device's steps, and the sums after the steps of all devices."""
    empty = empty_where(jnp.array(True), call.state)
    from_empty = dataclasses.replace(call, state=empty)
    _, sums = WKV(match_varying_axes(from_empty), method)
    decay = broadcast_like(call.w * call.k.shape[1], sums.max)
    if call.rows.reset is not None:
        decay = jnp.where(call.rows.reset.any(axis=1)[:, None], jnp.inf, decay)

    def after(steps, before: WKVState) -> WKVState:
        decay, sums = steps
        return advance(decay, empty_where(decay == jnp.inf, before), sums)

    return states_between(after, (decay, sums), call.state, time_axis)
