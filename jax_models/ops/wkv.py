"""RWKV-4's weighted average of the past, computed around a running maximum."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jax_models.ops.affine import carry_dtype, floating_carry_dtype
from jax_models.ops.linear_recurrence import linear_recurrence
from jax_models.ops.masks import step_masks

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
    gradient with respect to N and D is a linear recurrence, run backwards by the same method:

        ∂L/∂N_{t−1} = exp(−w) ∂L/∂N_t + (∂L/∂y_t) / (D_{t−1} + exp(u + k_t))

    and ∂L/∂D_{t−1} the same with −y_t ∂L/∂y_t, each in units of its own max. There is no
    forward-mode gradient.

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
    return (y, last), (w, u, k, v, y, before, last, active)


def _backward(method: WKVMethod, residuals, gradients):
    w, u, k, v, y, before, last, active = residuals
    y_gradient, last_gradient = gradients
    through = partial(linear_recurrence, reverse=True, method=method)

    def where_active(x, otherwise=0):
        return x if active is None else jnp.where(active[..., None], x, otherwise)

    # Every exponential below is of a number ≤ 0, or above it by rounding alone.
    aged = before.max - _like(w, k)
    max_after = jnp.concatenate([before.max[:, 1:], last.max[:, None]], axis=1)
    decay = where_active(_exp(aged - max_after), 1)
    weight = where_active(_exp(k - max_after))
    bonus = k + _like(u, k)
    weighed = _add(before, WKVState(v, jnp.ones_like(v), bonus))
    gradient = where_active(y_gradient / weighed.den)
    now = jnp.exp(bonus - weighed.max) * gradient
    then = jnp.exp(before.max - weighed.max) * gradient

    end = jnp.stack(last_gradient[:2])
    sums, first = jax.vmap(through, in_axes=(None, 0, 0))(decay, jnp.stack([then, -then * y]), end)
    num, den = jnp.concatenate([sums[:, :, 1:], end[:, :, None]], axis=2)

    # The gradient of a step's exponent, and that of all before it, add up to that of the sums'
    # exponent after it. The larger part has few digits where it is nearly all: it is what the
    # smaller one leaves.
    u_gradient = then / weighed.den * jnp.exp(bonus - weighed.max) * (before.den * v - before.num)
    of_new, of_old = weight * (num * v + den), decay * (num * before.num + den * before.den)
    new_is_larger = where_active(k >= aged, False)
    smaller = jnp.where(new_is_larger, of_old, -of_new)
    exponent, first_exponent = through(
        jnp.where(new_is_larger, 0.0, jnp.ones_like(k)), smaller - u_gradient, last_gradient.max
    )
    exponent = jnp.concatenate([exponent[:, 1:], last_gradient.max[:, None]], axis=1)
    k_gradient = u_gradient + jnp.where(new_is_larger, exponent - of_old, of_new)
    v_gradient = now + weight * num
    kept = where_active(jnp.where(new_is_larger, of_old, exponent - of_new))
    state_gradient = WKVState(first[0], first[1], first_exponent)
    return (
        -_sum_steps(kept),
        _sum_steps(u_gradient),
        k_gradient,
        v_gradient,
        state_gradient,
        None,
        None,
    )


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
    reset,
) -> tuple[Any, WKVState]:
    """`output(S, step)` at each step, then `S ← exp(−w) S + step`; all outputs and the last S."""
    forms = {
        "sequential": partial(_sequential, output),
        "associative": partial(_associative, output),
    }
    arguments = (steps, w, start, active, reset)
    if method == "auto":
        return lax.platform_dependent(
            *arguments, cpu=forms["sequential"], default=forms["associative"]
        )
    return forms[method](*arguments)


def _sequential(output, steps: WKVState, w, start: WKVState, active, reset):
    """One step after the other."""
    time = steps.max.shape[1]

    def step(t, carry):
        before, outputs = carry
        now, is_active, is_reset = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, t, axis=1, keepdims=False),
            (steps, active, reset),
        )
        if reset is not None:
            before = _empty_where(is_reset[..., None], before)
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


def _associative(output, steps: WKVState, w, start: WKVState, active, reset):
    """All steps as one tree of additions, each sum with the decay that it stands for."""

    def combine(x, y):
        (x_decay, x), (y_decay, y) = x, y
        x = _empty_where(y_decay == jnp.inf, x)
        return x_decay + y_decay, _add(x._replace(max=x.max - y_decay), y)

    decay, terms = _like(w, steps.max[:1]), steps
    if active is not None:
        decay = jnp.where(active[..., None], decay, 0)
        terms = _empty_where(~active[..., None], terms)
    if reset is not None:
        decay = jnp.where(reset[..., None], jnp.inf, decay)
    sums = lax.associative_scan(combine, (decay, terms), axis=1)
    first = jax.tree.map(lambda s: s[:, None], start)
    _, after = combine((jnp.zeros_like(first.max), first), sums)
    before = jax.tree.map(lambda f, s: jnp.concatenate([f, s[:, :-1]], axis=1), first, after)
    if reset is not None:
        before = _empty_where(reset[..., None], before)
    return output(before, steps), jax.tree.map(lambda s: s[:, -1], after)
