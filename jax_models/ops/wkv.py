"""RWKV-4's weighted average of the past, computed around a running maximum."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jax_models.ops.affine import carry_dtype, floating_carry_dtype
from jax_models.ops.scan import document_ends, step_masks

WKVMethod = Literal["auto", "associative", "sequential"]
NEVER = -1e38
"""The exponent of a sum that nothing was added to; exp(NEVER − anything usual) is zero."""


class WKVState(NamedTuple):
    """The sums so far, each `exp(max)` times what is stored; an empty one is (0, 0, NEVER)."""

    num: Float[Array, "batch features"]
    den: Float[Array, "batch features"]
    max: Float[Array, "batch features"]


def empty_wkv_state(batch_size: int, features: int, dtype) -> WKVState:
    """The state before the first step."""
    return WKVState(*(jnp.full((batch_size, features), x, dtype) for x in (0, 0, NEVER)))


def wkv(
    k: Float[Array, "batch time features"],
    v: Float[Array, "batch time features"],
    state: WKVState | None = None,
    *,
    w: Float[Array, " features"],
    u: Float[Array, " features"],
    lengths: Int[Array, " batch"] | None = None,
    reset: Bool[Array, "batch time"] | None = None,
    method: WKVMethod = "auto",
) -> tuple[Float[Array, "batch time features"], WKVState]:
    """The average of the v_i so far, weighted by exp(k_i) and forgotten at the rate w.

        y_t = (N_{t−1} + exp(u + k_t) v_t) / (D_{t−1} + exp(u + k_t))
        N_t = exp(−w) N_{t−1} + exp(k_t) v_t
        D_t = exp(−w) D_{t−1} + exp(k_t)

    N and D are kept as `exp(max) · (num, den)`, where max is the largest exponent in them: no
    exponential of a positive number is taken, and y is finite for any finite k, w and u. The
    gradient with respect to N and D is such a recurrence itself, run backwards:

        ∂L/∂N_{t−1} = exp(−w) ∂L/∂N_t + (∂L/∂y_t) / (D_{t−1} + exp(u + k_t))

    and ∂L/∂D_{t−1} the same with −y_t ∂L/∂y_t. There is no forward-mode gradient.

    Args:
        k: the keys.
        v: the values.
        state: the sums before the first step; empty when None.
        w: the decay of a step, `exp(time_decay)` in RWKV-4.
        u: the bonus of the current step, `time_first` in RWKV-4.
        lengths: row b takes only the steps t < lengths[b].
        reset: the first steps of packed documents, where the state restarts empty.
        method: "sequential", T steps in place; "associative", `jax.lax.associative_scan`, O(log T)
            deep; "auto", sequential on a CPU and associative elsewhere.

    Returns:
        All y (those beyond `lengths` carry no meaning) and the last state, in at least float32.

    Raises:
        TypeError: k or v is not floating.
        ValueError: a shape is wrong, or there is no such method.

    Source: Peng et al. 2023 (arXiv 2305.13048), its appendix on numerical stability.

    """
    if k.shape != v.shape or k.ndim != 3:
        raise ValueError(
            f"k, v: expected one shape (batch, time, features), got {k.shape} and {v.shape}"
        )
    if method not in get_args(WKVMethod):
        raise ValueError(f"method: expected one of {get_args(WKVMethod)}, got {method!r}")
    batch, _, features = k.shape
    if state is None:
        state = empty_wkv_state(batch, features, carry_dtype(k.dtype))
    vectors = {"w": w, "u": u}
    sums = {f"state.{name}": array for name, array in state._asdict().items()}
    for name, array in (vectors | sums).items():
        shape = (features,) if name in vectors else (batch, features)
        if array.shape != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {array.shape}")
    dtype = floating_carry_dtype(k=k, v=v)
    w, u, k, v, num, den, max = (x.astype(dtype) for x in (w, u, k, v, *state))
    state = WKVState(num, den, max)
    if k.shape[1] == 0:
        return v, state
    active, reset = step_masks(k.shape[1], lengths, reset)
    return _wkv(method, w, u, k, v, state, active, reset)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _wkv(method: WKVMethod, w, u, k, v, state, active, reset):
    steps = WKVState(v, jnp.ones_like(v), k)
    return _decaying_sums(method, partial(_average, u), steps, w, state, active, reset)


def _forward(method: WKVMethod, w, u, k, v, state, active, reset):
    def output(before, now):
        return _average(u, before, now), before

    steps = WKVState(v, jnp.ones_like(v), k)
    (y, before), last = _decaying_sums(method, output, steps, w, state, active, reset)
    return (y, last), (w, u, k, v, state, y, before, last, active, reset)


def _backward(method: WKVMethod, residuals, gradients):
    w, u, k, v, state, y, before, last, active, reset = residuals
    y_gradient, last_gradient = gradients

    def where_active(x):
        return x if active is None else jnp.where(active[..., None], x, jnp.zeros_like(x))

    # `after` at t is ∂L/∂(N_t, D_t) as exp(max) · (num, den). Its max is minus an exponent of the
    # future: every exponential below is of a number ≤ 0, or above it by rounding alone.
    bonus = k + _like(u, k)
    weighed = _add(before, WKVState(v, jnp.ones_like(v), bonus))
    gradient = where_active(y_gradient / weighed.den)
    after, first = _decaying_sums(
        method,
        lambda before, now: before,
        WKVState(gradient, -gradient * y, -weighed.max),
        w,
        last_gradient._replace(max=-last.max),
        active,
        None if reset is None else document_ends(reset),
        reverse=True,
    )
    if reset is not None:
        first = _empty_where(reset[:, 0][..., None], first)

    # last.max is one of the k_t, or state.max, less the decay since: its gradient goes there.
    index = jnp.arange(k.shape[1])[None, :, None]
    is_max = where_active(before.max - _like(w, k) <= k)
    newest = jnp.max(jnp.where(is_max, index, -1), axis=1)
    count = k.shape[1] if active is None else jnp.sum(active, axis=1, dtype=newest.dtype)[:, None]
    max_gradient = last_gradient.max - _inner(last_gradient, last)

    # v − y by what was before: where the step is all of y, their difference has no digits.
    now = jnp.exp(bonus - weighed.max) * gradient
    then = jnp.exp(before.max - weighed.max) / weighed.den
    scale = where_active(_exp(k + after.max))
    u_gradient = now * then * (before.den * v - before.num)
    k_gradient = u_gradient + scale * (after.num * v + after.den)
    k_gradient += jnp.where(index == newest[:, None], max_gradient[:, None], 0)
    v_gradient = now + scale * after.num
    kept = where_active(_exp(after.max - _like(w, k) + before.max) * _inner(after, before))
    aged = max_gradient * (count - 1 - newest).astype(w.dtype)
    scale = _exp(first.max + state.max)
    state_gradient = WKVState(
        scale * first.num,
        scale * first.den,
        scale * _inner(first, state) + jnp.where(newest < 0, max_gradient, 0),
    )
    w_gradient = -_sum_steps(kept) - jnp.sum(aged, axis=0)
    u_gradient = _sum_steps(u_gradient)
    return w_gradient, u_gradient, k_gradient, v_gradient, state_gradient, None, None


_wkv.defvjp(_forward, _backward)


def _exp(x):
    """The exponential of a number that only rounding lifts above 0."""
    return jnp.exp(jnp.minimum(x, 0))


def _sum_steps(x):
    return jnp.sum(x, axis=(0, 1))


def _average(u, before: WKVState, now: WKVState):
    """y: the sums before a step, and the step with its bonus, as a quotient."""
    both = _add(before, now._replace(max=now.max + _like(u, now.max)))
    return both.num / both.den


def _like(x: Float[Array, " features"], like: Float[Array, "*steps features"]):
    return jnp.broadcast_to(x, like.shape)


def _inner(x: WKVState, y: WKVState):
    return x.num * y.num + x.den * y.den


def _add(x: WKVState, y: WKVState) -> WKVState:
    """The sum of two scaled pairs, around the larger of their exponents."""
    difference = x.max - y.max
    smaller = jnp.exp(-jnp.abs(difference))
    of_x = jnp.where(difference > 0, 1, smaller)
    of_y = jnp.where(difference > 0, smaller, 1)
    return WKVState(
        of_x * x.num + of_y * y.num, of_x * x.den + of_y * y.den, jnp.maximum(x.max, y.max)
    )


def _empty_where(condition: Bool[Array, "..."], sums: WKVState) -> WKVState:
    """Sums to which nothing was added, where the condition holds."""
    empty = (0.0, 0.0, NEVER)
    return WKVState(*(jnp.where(condition, e, s) for e, s in zip(empty, sums, strict=True)))


def _decaying_sums(
    method: WKVMethod,
    output: Callable[[WKVState, WKVState], Any],
    steps: WKVState,
    w,
    start: WKVState,
    active,
    restart,
    *,
    reverse: bool = False,
) -> tuple[Any, WKVState]:
    """`output(S, step)` at each step, then `S ← exp(−w) S + step`; all outputs and the last S."""
    forms = {
        "sequential": partial(_sequential, output, reverse=reverse),
        "associative": partial(_associative, output, reverse=reverse),
    }
    arguments = (steps, w, start, active, restart)
    if method == "auto":
        return lax.platform_dependent(
            *arguments, cpu=forms["sequential"], default=forms["associative"]
        )
    return forms[method](*arguments)


def _sequential(output, steps: WKVState, w, start: WKVState, active, restart, *, reverse: bool):
    """One step after the other."""
    time = steps.max.shape[1]

    def step(i, carry):
        before, outputs = carry
        t = time - 1 - i if reverse else i
        now, is_active, restarts = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, t, axis=1, keepdims=False),
            (steps, active, restart),
        )
        if restart is not None:
            before = _empty_where(restarts[..., None], before)
        outputs = jax.tree.map(
            lambda ys, y: lax.dynamic_update_index_in_dim(ys, y, t, axis=1),
            outputs,
            output(before, now),
        )
        after = _add(before._replace(max=before.max - _like(w, before.max)), now)
        if active is not None:
            after = jax.tree.map(lambda a, b: jnp.where(is_active[:, None], a, b), after, before)
        return after, outputs

    outputs = jax.tree.map(jnp.zeros_like, jax.eval_shape(output, steps, steps))
    last, outputs = lax.fori_loop(0, time, step, (start, outputs))
    return outputs, last


def _associative(output, steps: WKVState, w, start: WKVState, active, restart, *, reverse: bool):
    """All steps as one tree of additions, each sum with the decay that it stands for."""

    def combine(x, y):
        (x_decay, x), (y_decay, y) = x, y
        x = _empty_where(y_decay == jnp.inf, x)
        return x_decay + y_decay, _add(x._replace(max=x.max - y_decay), y)

    decay, terms = _like(w, steps.max[:1]), steps
    if active is not None:
        decay = jnp.where(active[..., None], decay, 0)
        terms = _empty_where(~active[..., None], terms)
    if restart is not None:
        decay = jnp.where(restart[..., None], jnp.inf, decay)
    sums = lax.associative_scan(combine, (decay, terms), axis=1, reverse=reverse)
    first = jax.tree.map(lambda s: s[:, None], start)
    _, after = combine((jnp.zeros_like(first.max), first), sums)
    if reverse:
        before = jax.tree.map(lambda f, s: jnp.concatenate([s[:, 1:], f], axis=1), first, after)
    else:
        before = jax.tree.map(lambda f, s: jnp.concatenate([f, s[:, :-1]], axis=1), first, after)
    if restart is not None:
        before = _empty_where(restart[..., None], before)
    last = jax.tree.map(lambda s: s[:, 0 if reverse else -1], after)
    return output(before, steps), last
