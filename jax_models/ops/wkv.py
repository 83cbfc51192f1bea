"""RWKV-4's weighted average of the past, computed around a running maximum."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim
from jaxtyping import Array, Float

from jax_models.checks.arguments import checked
from jax_models.checks.values import FloatingDtype, checked_count
from jax_models.ops.affine import carry_dtype, common_carry_dtype
from jax_models.ops.by_platform import by_platform
from jax_models.ops.kernels.device_scan import KERNEL_METHODS, known_size
from jax_models.ops.kernels.row_scan import row_scan
from jax_models.ops.linear_map import linear_map
from jax_models.ops.rows import DividedMasks, given_rows
from jax_models.ops.scaled_sums import (
    EMPTY_EXPONENT,
    WKVState,
    add,
    advance,
    broadcast_like,
    clip_to_finite,
    empty_where,
    step_sums,
    step_sums_or_empty,
)
from jax_models.ops.shard_map_axes import match_varying_axes
from jax_models.ops.time_axis import states_between
from jax_models.ops.wkv_derivative import Residuals, gradient, tangent

WKVMethod = Literal["auto", "associative", "sequential", "pallas", "pallas_interpreted"]

MANY, LARGE = 2**12, 2**22
"""On an H100, the kernel was the fastest method, forward and backward, if rows × features was at
least MANY and the total number of elements at least LARGE.
"""


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
        method: "sequential" runs T steps in place. "associative" is `jax.lax.associative_scan`, of
            depth O(log T). "pallas" runs the sequential steps in one kernel
            (`ops.kernels.row_scan`). "pallas_interpreted" runs the TPU's kernel in an interpreter,
            which is slow but works anywhere. "auto" is sequential on a CPU and uses the kernel on a
            TPU, and on an NVIDIA GPU for large arrays. Otherwise, and where no kernel works, it is
            associative.
        **masks: `lengths`, `reset` and `time_axis`, as in `DividedMasks`. At a `reset`, the sums
            restart empty. With a `time_axis`, the devices exchange the sums of their steps, and
            each then runs from the sums before its own steps.

    Returns:
        All y and the last state, in at least float32. Each y beyond `lengths` is meaningless.

    Raises:
        NotImplementedError: `lengths` are given with a `time_axis`. Also when the program is
            lowered, if "pallas" has no kernel for this device, dtype or division over devices.
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
    last = None
    if rows.time_axis is not None:
        state, last = _device_sums(method, rows.time_axis, w, u, k, v, state, rows.reset)
    y, own_last = _compiled(
        method, *match_varying_axes((w, u, k, v, state, rows.active, rows.reset))
    )
    last = own_last if last is None else last
    return y, last._replace(max=jnp.where(last.den == 0, EMPTY_EXPONENT, last.max))


def _device_sums(
    method: WKVMethod, time_axis: str, w, u, k, v, start: WKVState, restart
) -> tuple[WKVState, WKVState]:
    """Returns the sums before this device's steps, and the sums after the steps of all devices."""
    empty = empty_where(jnp.array(True), start)
    _, sums = _compiled(method, *match_varying_axes((w, u, k, v, empty, None, restart)))
    decay = broadcast_like(w * k.shape[1], sums.max)
    if restart is not None:
        decay = jnp.where(restart.any(axis=1)[:, None], jnp.inf, decay)

    def after(steps, before: WKVState) -> WKVState:
        decay, sums = steps
        return advance(decay, empty_where(decay == jnp.inf, before), sums)

    return states_between(after, (decay, sums), start, time_axis)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _wkv(method: WKVMethod, w, u, k, v, state, active, reset):
    return _decaying_sums(method, _average, w, u, k, v, state, active, reset)


@_wkv.defjvp
def _wkv_jvp(method: WKVMethod, primals, tangents):
    w, u, k, v, _, active, _ = primals
    (y, before), last = _decaying_sums(method, _average_and_before, *primals)
    residuals = Residuals(w, u, k, v, y, before, last, active)
    return (y, last), linear_map(tangent, gradient, residuals, tangents[:5], method)


_compiled = jax.jit(_wkv, static_argnums=0)
"""The average, compiled once for all calls outside of `jax.jit`."""


def _average(u, before: WKVState, now: WKVState):
    """Computes y as the quotient of the sums before a step plus the step with its bonus."""
    both = add(before, now._replace(max=clip_to_finite(now.max + broadcast_like(u, now.max))))
    return both.num / both.den


def _average_and_before(u, before: WKVState, now: WKVState):
    return _average(u, before, now), before


Output = Callable[[Array, WKVState, WKVState], Any]


def _decaying_sums(
    method: WKVMethod, output: Output, w, u, k, v, start: WKVState, active, reset
) -> tuple[Any, WKVState]:
    """Runs `output(u, S, step)`, then `S ← exp(−w) S + step`. Returns all outputs, the last S."""
    forms = {
        "sequential": partial(_sequential, output),
        "associative": partial(_associative, output),
        **{
            name: partial(_in_kernel, partial(row_scan, interpret=interpret), output)
            for name, interpret in KERNEL_METHODS.items()
        },
    }
    arguments = (w, u, k, v, start, active, reset)
    # An associative scan and the kernel need a known number of steps.
    if method == "auto" and is_symbolic_dim(k.shape[1]):
        method = "sequential"
    if method == "auto":
        with_kernel = partial(row_scan, fallback=_without_kernel(output))
        by_kernel = partial(_in_kernel, with_kernel, output)
        batch, _, features = k.shape
        many = known_size(batch, features) >= MANY and known_size(*k.shape) >= LARGE
        return by_platform(
            *arguments,
            cpu=forms["sequential"],
            tpu=by_kernel,
            cuda=by_kernel if many else forms["associative"],
            default=forms["associative"],
        )
    return forms[method](*arguments)


def _sequential(output: Output, w, u, k, v, start: WKVState, active, reset):
    """Runs one step after the other."""
    steps = step_sums(k.astype(w.dtype), v.astype(w.dtype))

    def step(t, carry):
        before, outputs = carry
        now, is_active, is_reset = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, t, axis=1, keepdims=False),
            (steps, active, reset),
        )
        if reset is not None:
            before = empty_where(is_reset[..., None], before)
        outputs = jax.tree.map(
            lambda ys, y: lax.dynamic_update_index_in_dim(ys, y, t, axis=1),
            outputs,
            output(u, before, now),
        )
        after = advance(broadcast_like(w, before.max), before, now)
        if active is not None:
            after = jax.tree.map(lambda a, b: jnp.where(is_active[:, None], a, b), after, before)
        return after, outputs

    outputs = jax.eval_shape(output, u, steps, steps)
    outputs = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), outputs)
    *_, outputs = match_varying_axes((*steps, outputs))
    last, outputs = lax.fori_loop(0, k.shape[1], step, (start, outputs))
    return outputs, last


def _associative(output: Output, w, u, k, v, start: WKVState, active, reset):
    """Computes the sums of all steps by an associative scan."""
    k, v = k.astype(w.dtype), v.astype(w.dtype)
    forgets = None if reset is None else reset[..., None]
    before, last = _tree(*_masked(w, k, v, active, reset), start, forgets)
    return output(u, before, step_sums(k, v)), last


def _masked(w, k, v, active, reset):
    """Returns decays, keys and values with which padding adds nothing and a reset forgets all."""
    decay = broadcast_like(w, k[:1])
    if active is not None:
        active = active[..., None]
        decay = jnp.where(active, decay, 0)
        k, v = jnp.where(active, k, -jnp.inf), jnp.where(active, v, 0)
    if reset is not None:
        decay = jnp.where(reset[..., None], jnp.inf, decay)
    return decay, k, v


def _tree(decay, k, v, start: WKVState, forgets) -> tuple[WKVState, WKVState]:
    """Returns the sums before each step and the last sums, computed by an associative scan."""

    def combine(x, y):
        (x_decay, x), (y_decay, y) = x, y
        x = empty_where(y_decay == jnp.inf, x)
        forgets = (x_decay == jnp.inf) | (y_decay == jnp.inf)
        decay = jnp.where(forgets, jnp.inf, clip_to_finite(x_decay + y_decay))
        return decay, advance(y_decay, x, y)

    sums = lax.associative_scan(combine, (decay, step_sums_or_empty(k, v)), axis=1)
    first = jax.tree.map(lambda s: s[:, None], start)
    _, after = combine((jnp.zeros_like(first.max), first), sums)
    before = jax.tree.map(lambda f, s: jnp.concatenate([f, s[:, :-1]], axis=1), first, after)
    if forgets is not None:
        before = empty_where(forgets, before)
    return before, jax.tree.map(lambda s: s[:, -1], after)


def _in_kernel(scan, output: Output, w, u, k, v, start: WKVState, active, reset):
    """Runs the steps in a kernel. w and u are part of its state, and stay unchanged."""
    xs = [k, v]
    if active is not None or reset is not None:
        decay, k, v = _masked(w, k.astype(w.dtype), v.astype(w.dtype), active, reset)
        xs = [k, v, broadcast_like(decay, k)]
    rows = [*start, broadcast_like(w, start.max), broadcast_like(u, start.max)]
    shape = jax.eval_shape(output, rows[-1], start, start)
    ys, last = scan(_kernel_step(output), rows, xs, outputs=len(jax.tree.leaves(shape)))
    if active is not None:  # before the first active step, y would be 0 / 0
        ys = [jnp.where(active[..., None], ys[0], 0), *ys[1:]]
    return jax.tree.unflatten(jax.tree.structure(shape), ys), WKVState(*last[:3])


@cache
def _kernel_step(output: Output):
    """Returns the step for `row_scan`."""

    def step(state, k, v, *decays):
        *sums, w, u = state
        before = WKVState(*sums)
        [decay] = decays or [w]
        if decays:
            before = empty_where(decay == jnp.inf, before)
        now = step_sums_or_empty(k, v)
        return (*advance(decay, before, now), w, u), jax.tree.leaves(output(u, before, now))

    return step


@cache
def _without_kernel(output: Output):
    """Returns a fallback of `row_scan` by the associative method."""

    def sums(start, xs):
        (*rows, w, u), (k, v, *decays) = start, xs
        [decay] = decays or [broadcast_like(w[:, None], k)]
        before, last = _tree(decay, k, v, WKVState(*rows), decay == jnp.inf if decays else None)
        return jax.tree.leaves(output(u[:, None], before, step_sums(k, v))), [*last, w, u]

    return sums
