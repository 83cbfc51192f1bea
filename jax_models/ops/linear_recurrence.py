"""The diagonal linear recurrence, computed by the method that suits the device."""

from functools import partial
from typing import Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from jax_models.checks.arguments import checked
from jax_models.ops.affine import common_carry_dtype
from jax_models.ops.linear_map import linear_map
from jax_models.ops.linear_scan import LinearRecurrenceMethod, advance, solve
from jax_models.ops.rows import DividedMasks, given_rows
from jax_models.ops.shard_map_axes import match_varying_axes
from jax_models.ops.time_axis import states_between


@checked()
def linear_recurrence(
    a: Inexact[Array, "batch time features"],
    b: Inexact[Array, "batch time features"],
    h0: Inexact[Array, "batch features"] | None = None,
    *,
    reverse: bool = False,
    method: LinearRecurrenceMethod = "auto",
    **masks: Unpack[DividedMasks],
) -> tuple[Inexact[Array, "batch time features"], Inexact[Array, "batch features"]]:
    """`h_t = a_t ⊙ h_{t−1} + b_t` for t = 0 … T−1, or `a_t ⊙ h_{t+1} + b_t` with `reverse`.

    The gradient is the same recurrence in the other direction, and is computed by the same method:

        g_t = ∂L/∂h_t + a_{t+1} ⊙ g_{t+1},   ∂L/∂b_t = g_t,   ∂L/∂a_t = g_t ⊙ h_{t−1}

    The backward pass needs only a and h. Forward mode and higher derivatives are linear
    recurrences, too. If a_t is 0, h_t does not depend on h_{t−1}, even if that is NaN. If a or b is
    complex, so are all h, and gradients follow JAX's convention, without conjugation.

    Args:
        a: the factors of the state. The parallel methods multiply factors of several steps, so
            |a| ≤ 1 keeps every method finite. a = 0 and a = 1 are exact.
        b: the inputs.
        h0: the state before the first step (with `reverse`, after the last). None: zeros. It is
            cast to the dtype of the accumulation.
        reverse: whether to run from the last step to the first.
        method: "sequential" runs T steps in place. "associative" is `jax.lax.associative_scan`, of
            depth O(log T). "chunked" runs √T chunks of √T steps in parallel, first to find the
            states between chunks, then to compute all states. "pallas" runs the sequential steps in
            one kernel (`ops.kernels.row_scan`), for real numbers only. "pallas_interpreted" runs
            the TPU's kernel in an interpreter, which is slow but works anywhere. "auto" is
            sequential on a CPU and uses the kernel on a TPU and on an NVIDIA GPU, where it divides
            time into chunks if the rows are few. Where no kernel works, and on a GPU for small
            arrays, "auto" is associative.
        **masks: `lengths`, `reset` and `time_axis`, as in `DividedMasks`. At a `reset`, the state
            restarts from zero. With a `time_axis`, `h_t = P_t h + h⁰_t` on each device, where h is
            the state before the device's steps, P_t is the product of its factors up to step t, and
            h⁰_t is the state if h were zero. The devices exchange their last P and h⁰.

    Returns:
        All h and the last h, computed in at least float32. Each h beyond `lengths` is meaningless.

    Raises:
        NotImplementedError: `lengths` are given with a `time_axis`. Also when the program is
            lowered, if "pallas" has no kernel for this device, dtype or division over devices.
        TypeError: an array is not floating or complex, or h0 is complex while a and b are real.
        ValueError: the shapes differ, a length lies outside 0 … time, or there is no such method.

    """
    rows = given_rows(masks)
    dtype = common_carry_dtype(a, b)
    if h0 is None:
        h0 = jnp.zeros((a.shape[0], a.shape[2]), dtype)
    elif jnp.iscomplexobj(h0) and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"h0: expected a floating dtype, as a and b have, got {h0.dtype}")
    h0 = h0.astype(dtype)
    if a.dtype != b.dtype:
        a, b = a.astype(dtype), b.astype(dtype)
    if 0 in a.shape:
        return b.astype(dtype), h0
    restart = rows.restarts(reverse=reverse)
    if restart is not None:
        a = jnp.where(restart[..., None], 0, a)
    if rows.active is not None:
        a, b = jnp.where(rows.active[..., None], a, 1), jnp.where(rows.active[..., None], b, 0)
    if rows.time_axis is not None:
        return _over_devices(method, reverse, rows.time_axis, a, b, h0)
    h = _compiled(method, reverse, *match_varying_axes((a, b, h0)))
    return h, h[:, 0 if reverse else -1]


def _over_devices(
    method: LinearRecurrenceMethod, reverse: bool, time_axis: str, a, b, h0
) -> tuple[Array, Array]:
    from_zero = _compiled(method, reverse, *match_varying_axes((a, b, jnp.zeros_like(h0))))
    products = _compiled(
        method, reverse, *match_varying_axes((a, jnp.zeros_like(b), jnp.ones_like(h0)))
    )
    end = 0 if reverse else -1
    h, last = states_between(
        lambda steps, h: advance(steps[0], h, steps[1]),
        (products[:, end], from_zero[:, end]),
        h0,
        time_axis,
        reverse=reverse,
    )
    return advance(products, h[:, None], from_zero), last


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _recurrence(method: LinearRecurrenceMethod, reverse: bool, a, b, h0):
    return solve(method, a, b, h0, reverse=reverse)


@_recurrence.defjvp
def _recurrence_jvp(method: LinearRecurrenceMethod, reverse: bool, primals, tangents):
    a, b, h0 = primals
    h = _recurrence(method, reverse, a, b, h0)
    return h, linear_map(_tangent, _gradient, (a, h, h0), tangents, method, reverse)


_compiled = jax.jit(_recurrence, static_argnums=(0, 1))
"""The recurrence, compiled once for all calls outside of `jax.jit`."""


def _tangent(method: LinearRecurrenceMethod, reverse: bool, residuals, tangents):
    """`dh_t = a_t dh_{t−1} + (da_t h_{t−1} + db_t)`, the same recurrence."""
    a, h, h0 = residuals
    d_a, d_b, d_h0 = tangents
    d_b = d_a.astype(h.dtype) * _before(h, h0, reverse) + d_b.astype(h.dtype)
    return _recurrence(method, reverse, a, d_b, d_h0)


def _gradient(method: LinearRecurrenceMethod, reverse: bool, residuals, h_gradient):
    """The transpose of `_tangent`: the recurrence in the other direction."""
    a, h, h0 = residuals
    g = _shifted_recurrence(method, not reverse, a, h_gradient)
    first = -1 if reverse else 0
    h0_gradient = advance(a[:, first].astype(g.dtype), g[:, first], 0)
    a_gradient = g * _before(h, h0, reverse)
    return a_gradient.astype(a.dtype), g.astype(a.dtype), h0_gradient


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _shifted_recurrence(method: LinearRecurrenceMethod, reverse: bool, a, b):
    """The recurrence from zero whose step t is multiplied by a_{t−1} instead of a_t."""
    return solve(method, a, b, jnp.zeros_like(b[:, 0]), reverse=reverse, shifted=True)


@_shifted_recurrence.defjvp
def _ahead_jvp(method: LinearRecurrenceMethod, reverse: bool, primals, tangents):
    def with_factors_moved(a, b):
        a = jnp.roll(a, -1 if reverse else 1, axis=1)
        return _recurrence(method, reverse, a, b, jnp.zeros_like(b[:, 0]))

    return jax.jvp(with_factors_moved, primals, tangents)


def _before(h, h0, reverse: bool):
    """The state before each step."""
    if reverse:
        return jnp.concatenate([h[:, 1:], h0[:, None]], axis=1)
    return jnp.concatenate([h0[:, None], h[:, :-1]], axis=1)
