"""RWKV-4's weighted average of the past, computed around a running maximum."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int

from jax_models.ops.affine import carry_dtype, common_carry_dtype
from jax_models.ops.by_platform import by_platform
from jax_models.ops.checks import FloatingDtype, checked, checked_count
from jax_models.ops.kernels.row_scan import KERNELS, row_scan
from jax_models.ops.linear_map import linear_map
from jax_models.ops.linear_recurrence import linear_recurrence
from jax_models.ops.segments import segments
from jax_models.ops.varying import alike

WKVMethod = Literal["auto", "associative", "sequential", "pallas", "pallas_interpreted"]
NEVER = -1e38
"""The exponent of a sum that nothing was added to, in a `WKVState`."""


class WKVState(NamedTuple):
    """The sums so far, each `exp(max)` times what is stored; an empty one is (0, 0, NEVER)."""

    num: Float[Array, "batch features"]
    den: Float[Array, "batch features"]
    max: Float[Array, "batch features"]


@checked({int: checked_count})
def empty_wkv_state(batch_size: int, features: int, dtype: FloatingDtype) -> WKVState:
    """The state before the first step."""
    return WKVState(*(jnp.full((batch_size, features), x, dtype) for x in (0, 0, NEVER)))


@checked()
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

    and ∂L/∂D_{t−1} the same with −y_t ∂L/∂y_t, each in units of its own max. Forward
    mode is linear recurrences, too.

    Args:
        k: the keys.
        v: the values.
        state: the sums before the first step; empty when None.
        w: the decay of a step, `exp(time_decay)` in RWKV-4.
        u: the bonus of the current step, `time_first` in RWKV-4.
        lengths: row b takes only the steps t < lengths[b].
        reset: the first steps of packed documents, where the state restarts empty.
        method: "sequential", T steps in place; "associative", `jax.lax.associative_scan`, O(log T)
            deep; "pallas", the sequential steps in one kernel (`ops.kernels.row_scan`);
            "pallas_interpreted", the TPU's kernel in an interpreter, anywhere and slowly; "auto",
            sequential on a CPU, on a TPU the kernel where it can serve, associative elsewhere.

    Returns:
        All y (those beyond `lengths` carry no meaning) and the last state, in at least float32.

    Raises:
        NotImplementedError: "pallas" has no kernel for this device, dtype or division over devices;
            when the program is lowered.
        TypeError: an array is of another kind of dtype.
        ValueError: a shape is wrong, a length lies outside 0 … time, or there is no such method.

    Source: Peng et al. 2023 (arXiv 2305.13048), its appendix on numerical stability.

    """
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
    active, restart = segments(k.shape[1], lengths, reset)
    state = state._replace(max=jnp.where(state.den == 0, -jnp.inf, state.max))
    y, last = _compiled(method, *alike((w, u, k, v, state, active, restart)))
    return y, last._replace(max=jnp.where(last.den == 0, NEVER, last.max))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _wkv(method: WKVMethod, w, u, k, v, state, active, reset):
    return _decaying_sums(method, _average, w, u, k, v, state, active, reset)


@_wkv.defjvp
def _wkv_jvp(method: WKVMethod, primals, tangents):
    w, u, k, v, _, active, _ = primals
    (y, before), last = _decaying_sums(method, _average_and_before, *primals)
    residuals = _Residuals(w, u, k, v, y, before, last, active)
    return (y, last), linear_map(_Tangent(method), _Gradient(method), residuals, tangents[:5])


_compiled = jax.jit(_wkv, static_argnums=0)
"""Compiled once for all calls that nobody else compiles."""


class _Residuals(NamedTuple):
    w: Array
    u: Array
    k: Array
    v: Array
    y: Array
    before: WKVState
    last: WKVState
    active: Array | None

    def wide(self) -> "_Residuals":
        """The keys and values in the dtype of the sums."""
        return self._replace(k=self.k.astype(self.w.dtype), v=self.v.astype(self.w.dtype))

    def where_active(self, x, otherwise=0):
        """x, and something else at steps that are not real."""
        return x if self.active is None else jnp.where(self.active[..., None], x, otherwise)

    def carried(self, x):
        """x, and 0 where nothing was: a NaN stays out of the document before."""
        return jnp.where(self.before.den == 0, 0, x)

    def factors(self) -> "_Factors":
        """The factors of each step.

        Every exponential is of a number ≤ 0, or above it by rounding alone. Where a step is not the
        largest, the maximum has only aged: by 1, not by what the rounding of max − w makes of it.
        """
        w, u, k, v, _, before, last, _ = self
        max_after = _finite(jnp.concatenate([before.max[:, 1:], last.max[:, None]], axis=1))
        new_is_larger = self.where_active((k >= max_after) | (before.den == 0), False)
        aged = _aged(before, _like(w, k)).max
        bonus = _finite(k + _like(u, k))
        weighed = _add(before, WKVState(v, jnp.ones_like(v), bonus))
        share = self.where_active(jnp.exp(bonus - weighed.max) / weighed.den)
        past_share = self.carried(jnp.exp(before.max - weighed.max) / weighed.den)
        past_share = self.where_active(past_share)
        return _Factors(
            new_is_larger,
            jnp.where(new_is_larger, self.carried(_exp(aged - max_after)), 1),
            self.where_active(_exp(k - max_after)),
            share,
            past_share,
            past_share * share * (before.den * v - before.num),
        )


class _Factors(NamedTuple):
    new_is_larger: Array
    """Is the step's exponent the largest so far?"""
    decay: Array
    """Of the sums before the step, in the sums after it."""
    weight: Array
    """Of the step, in the sums after it."""
    share: Array
    """The derivative of y by v."""
    past_share: Array
    """The derivative of y by the numerator before the step."""
    slope: Array
    """The derivative of y by the step's exponent with its bonus, and minus that by the past's."""


class _Tangent(NamedTuple):
    """The derivative: linear recurrences, in units of the maxima."""

    method: WKVMethod

    def __call__(self, residuals: _Residuals, tangents):
        _, _, k, v, y, before, _, _ = residuals = residuals.wide()
        d_w, d_u, d_k, d_v, d_state = tangents
        d_w, d_u = _like(d_w, k), _like(d_u, k)
        d_k, d_v = d_k.astype(k.dtype), d_v.astype(k.dtype)
        factors = residuals.factors()
        through = partial(linear_recurrence, method=self.method)

        def before_each(first, after):
            return jnp.concatenate([first[:, None], after[:, :-1]], axis=1)

        aged = residuals.where_active(-d_w)
        d_max, d_last_max = through(
            jnp.where(factors.new_is_larger, 0.0, jnp.ones_like(k)),
            jnp.where(factors.new_is_larger, d_k, aged),
            d_state.max,
        )
        d_max_before = before_each(d_state.max, d_max)
        d_old = factors.decay * jnp.where(factors.new_is_larger, d_max_before - d_w - d_k, 0)
        d_new = factors.weight * jnp.where(factors.new_is_larger, 0, d_k - d_max)
        d_num = d_old * before.num + d_new * v + factors.weight * d_v
        d_den = d_old * before.den + d_new
        sums, last = jax.vmap(through, in_axes=(None, 0, 0))(
            factors.decay, jnp.stack([d_num, d_den]), jnp.stack([d_state.num, d_state.den])
        )
        d_num, d_den = map(before_each, d_state[:2], sums)
        d_y = factors.past_share * (d_num - y * d_den) + factors.share * d_v
        d_y = d_y + factors.slope * (d_k + d_u - d_max_before)
        return d_y, WKVState(last[0], last[1], d_last_max)


class _Gradient(NamedTuple):
    """The transpose of `_Tangent`."""

    method: WKVMethod

    def __call__(self, residuals: _Residuals, gradients):
        inputs_dtype = residuals.k.dtype
        _, _, k, v, y, before, _, _ = residuals = residuals.wide()
        y_gradient, last_gradient = residuals.where_active(gradients[0]), gradients[1]
        factors = residuals.factors()
        through = partial(linear_recurrence, reverse=True, method=self.method)

        then = residuals.carried(factors.past_share * y_gradient)
        end = jnp.stack(last_gradient[:2])
        sums, first = jax.vmap(through, in_axes=(None, 0, 0))(
            factors.decay, jnp.stack([then, residuals.carried(-then * y)]), end
        )
        num, den = jnp.concatenate([sums[:, :, 1:], end[:, :, None]], axis=2)

        # The gradient of a step's exponent, and that of all before it, add up to that of the sums'
        # exponent after it. The larger part has few digits where it is nearly all: it is what the
        # smaller one leaves.
        u_gradient = factors.slope * y_gradient
        of_new = factors.weight * (num * v + den)
        of_old = factors.decay * (num * before.num + den * before.den)
        smaller = jnp.where(factors.new_is_larger, of_old, -of_new)
        exponent, first_exponent = through(
            jnp.where(factors.new_is_larger, 0.0, jnp.ones_like(k)),
            residuals.carried(smaller - u_gradient),
            last_gradient.max,
        )
        exponent = jnp.concatenate([exponent[:, 1:], last_gradient.max[:, None]], axis=1)
        k_gradient = u_gradient + jnp.where(factors.new_is_larger, exponent - of_old, of_new)
        v_gradient = factors.share * y_gradient + factors.weight * num
        kept = jnp.where(factors.new_is_larger, of_old, exponent - of_new)
        return (
            -_sum_steps(residuals.where_active(kept)),
            _sum_steps(u_gradient),
            k_gradient.astype(inputs_dtype),
            v_gradient.astype(inputs_dtype),
            WKVState(first[0], first[1], first_exponent),
        )


def _exp(x):
    """The exponential of a number that only rounding lifts above 0."""
    return jnp.exp(jnp.minimum(x, 0))


def _sum_steps(x):
    return jnp.sum(x, axis=(0, 1))


def _average(u, before: WKVState, now: WKVState):
    """y: the sums before a step, and the step with its bonus, as a quotient."""
    both = _add(before, now._replace(max=_finite(now.max + _like(u, now.max))))
    return both.num / both.den


def _average_and_before(u, before: WKVState, now: WKVState):
    return _average(u, before, now), before


def _like(x: Float[Array, "..."], like: Float[Array, "*steps features"]):
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
    empty = (0.0, 0.0, -jnp.inf)  # however it ages, it stays below all others
    return WKVState(*(jnp.where(condition, e, s) for e, s in zip(empty, sums, strict=True)))


def _advance(decay, before: WKVState, now: WKVState) -> WKVState:
    """`exp(−decay) S + step`."""
    return _add(_aged(before, decay), now)


def _aged(sums: WKVState, decay) -> WKVState:
    return sums._replace(max=jnp.minimum(sums.max - decay, _largest(sums.max.dtype)))


def _largest(dtype) -> float:
    return float(jnp.finfo(dtype).max)


def _finite(x):
    """A sum of exponents: where it overflows, the dtype's largest number or its negative."""
    return jnp.clip(x, -_largest(x.dtype), _largest(x.dtype))


def _step(k, v) -> WKVState:
    """What a step adds to the sums."""
    return WKVState(v, jnp.ones_like(v), k)


def _step_or_nothing(k, v) -> WKVState:
    """What a step adds to the sums: nothing where k is −∞, as at the end of a row."""
    nothing = k == -jnp.inf
    return WKVState(jnp.where(nothing, 0, v), jnp.where(nothing, 0.0, jnp.ones_like(v)), _finite(k))


Output = Callable[[Array, WKVState, WKVState], Any]


def _decaying_sums(
    method: WKVMethod, output: Output, w, u, k, v, start: WKVState, active, reset
) -> tuple[Any, WKVState]:
    """`output(u, S, step)` at each step, then `S ← exp(−w) S + step`; all outputs, the last S."""
    forms = {
        "sequential": partial(_sequential, output),
        "associative": partial(_associative, output),
        **{name: partial(_in_kernel, scan, output) for name, scan in KERNELS.items()},
    }
    arguments = (w, u, k, v, start, active, reset)
    if method == "auto" and is_symbolic_dim(k.shape[1]):
        method = "sequential"
    if method == "auto":
        with_kernel = partial(row_scan, fallback=_without_kernel(output))
        return by_platform(
            *arguments,
            cpu=forms["sequential"],
            tpu=partial(_in_kernel, with_kernel, output),
            default=forms["associative"],
        )
    return forms[method](*arguments)


def _sequential(output: Output, w, u, k, v, start: WKVState, active, reset):
    """One step after the other."""
    steps = _step(k.astype(w.dtype), v.astype(w.dtype))

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
            output(u, before, now),
        )
        after = _advance(_like(w, before.max), before, now)
        if active is not None:
            after = jax.tree.map(lambda a, b: jnp.where(is_active[:, None], a, b), after, before)
        return after, outputs

    outputs = jax.eval_shape(output, u, steps, steps)
    outputs = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), outputs)
    *_, outputs = alike((*steps, outputs))
    last, outputs = lax.fori_loop(0, k.shape[1], step, (start, outputs))
    return outputs, last


def _associative(output: Output, w, u, k, v, start: WKVState, active, reset):
    """All steps as one tree of additions."""
    k, v = k.astype(w.dtype), v.astype(w.dtype)
    forgets = None if reset is None else reset[..., None]
    before, last = _tree(*_masked(w, k, v, active, reset), start, forgets)
    return output(u, before, _step(k, v)), last


def _masked(w, k, v, active, reset):
    """The decays, keys and values where an inactive step is nothing and a reset forgets all."""
    decay = _like(w, k[:1])
    if active is not None:
        active = active[..., None]
        decay = jnp.where(active, decay, 0)
        k, v = jnp.where(active, k, -jnp.inf), jnp.where(active, v, 0)
    if reset is not None:
        decay = jnp.where(reset[..., None], jnp.inf, decay)
    return decay, k, v


def _tree(decay, k, v, start: WKVState, forgets) -> tuple[WKVState, WKVState]:
    """The sums before each step, and the last: each with the decay that it stands for."""

    def combine(x, y):
        (x_decay, x), (y_decay, y) = x, y
        x = _empty_where(y_decay == jnp.inf, x)
        forgets = (x_decay == jnp.inf) | (y_decay == jnp.inf)
        decay = jnp.where(forgets, jnp.inf, _finite(x_decay + y_decay))
        return decay, _advance(y_decay, x, y)

    sums = lax.associative_scan(combine, (decay, _step_or_nothing(k, v)), axis=1)
    first = jax.tree.map(lambda s: s[:, None], start)
    _, after = combine((jnp.zeros_like(first.max), first), sums)
    before = jax.tree.map(lambda f, s: jnp.concatenate([f, s[:, :-1]], axis=1), first, after)
    if forgets is not None:
        before = _empty_where(forgets, before)
    return before, jax.tree.map(lambda s: s[:, -1], after)


def _in_kernel(scan, output: Output, w, u, k, v, start: WKVState, active, reset):
    """One step after the other; w and u are part of the state, which leaves them as they are."""
    xs = [k, v]
    if active is not None or reset is not None:
        decay, k, v = _masked(w, k.astype(w.dtype), v.astype(w.dtype), active, reset)
        xs = [k, v, _like(decay, k)]
    rows = [*start, _like(w, start.max), _like(u, start.max)]
    shape = jax.eval_shape(output, rows[-1], start, start)
    ys, last = scan(_kernel_step(output), rows, xs, outputs=len(jax.tree.leaves(shape)))
    if active is not None:  # an inactive step has no y before the first active one
        ys = [jnp.where(active[..., None], ys[0], 0), *ys[1:]]
    return jax.tree.unflatten(jax.tree.structure(shape), ys), WKVState(*last[:3])


@cache
def _kernel_step(output: Output):
    """A step of `row_scan`."""

    def step(state, k, v, *decays):
        *sums, w, u = state
        before = WKVState(*sums)
        [decay] = decays or [w]
        if decays:
            before = _empty_where(decay == jnp.inf, before)
        now = _step_or_nothing(k, v)
        return (*_advance(decay, before, now), w, u), jax.tree.leaves(output(u, before, now))

    return step


@cache
def _without_kernel(output: Output):
    """The associative form of a `row_scan`."""

    def sums(start, xs):
        (*rows, w, u), (k, v, *decays) = start, xs
        [decay] = decays or [_like(w[:, None], k)]
        before, last = _tree(decay, k, v, WKVState(*rows), decay == jnp.inf if decays else None)
        return jax.tree.leaves(output(u[:, None], before, _step(k, v))), [*last, w, u]

    return sums
