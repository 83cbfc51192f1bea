"""The derivative of RWKV-4's weighted average, as linear recurrences forwards and backwards."""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jax_models.ops.forms import Operator
from jax_models.ops.linear import LINEAR_RECURRENCE, linear_recurrence
from jax_models.ops.linear.wkv.definition import Average, scan
from jax_models.ops.linear.wkv.sums import WKVState, add, broadcast_like, clip_to_finite, decayed
from jax_models.ops.linear_map import linear_map


class Residuals(NamedTuple):
    """The arrays of the forward pass that the derivative needs."""

    w: Float[Array, " features"]
    u: Float[Array, " features"]
    k: Float[Array, "batch time features"]
    v: Float[Array, "batch time features"]
    y: Float[Array, "batch time features"]
    before: WKVState
    """The sums before each step, (batch, time, features)."""
    last: WKVState
    """The sums after the last step, (batch, features)."""
    active: Bool[Array, "batch time"] | None

    def cast_inputs(self) -> "Residuals":
        """Casts the keys and values to the dtype of the sums."""
        return self._replace(k=self.k.astype(self.w.dtype), v=self.v.astype(self.w.dtype))

    def where_active(self, x, otherwise=0):
        """Returns x, with another value in the padding."""
        return x if self.active is None else jnp.where(self.active[..., None], x, otherwise)

    def zero_where_empty(self, x):
        """Returns x, with 0 where the sums are empty: no NaN may reach the document before."""
        return jnp.where(self.before.den == 0, 0, x)

    def factors(self) -> "Factors":
        """The factors of each step.

        Exponentials are taken only of numbers ≤ 0, apart from rounding errors. If the exponent of a
        step is not the largest, the maximum has only decayed by w. In this case, the factor is
        exactly 1 rather than the result of a rounded difference.
        """
        w, u, k, v, _, before, last, _ = self
        max_after = clip_to_finite(jnp.concatenate([before.max[:, 1:], last.max[:, None]], axis=1))
        new_is_larger = self.where_active((k >= max_after) | (before.den == 0), False)
        max_aged = decayed(before, broadcast_like(w, k)).max
        bonus = clip_to_finite(k + broadcast_like(u, k))
        weighted = add(before, WKVState(v, jnp.ones_like(v), bonus))
        share = self.where_active(jnp.exp(bonus - weighted.max) / weighted.den)
        past_share = self.zero_where_empty(jnp.exp(before.max - weighted.max) / weighted.den)
        past_share = self.where_active(past_share)
        return Factors(
            new_is_larger,
            jnp.where(new_is_larger, self.zero_where_empty(_exp(max_aged - max_after)), 1),
            self.where_active(_exp(k - max_after)),
            share,
            past_share,
            past_share * share * (before.den * v - before.num),
        )


class Factors(NamedTuple):
    """The factors of the derivative for each step and feature, each (batch, time, features)."""

    new_is_larger: Array
    """Whether the step's exponent is the largest so far."""
    decay: Array
    """The weight of the sums before the step in the sums after it."""
    weight: Array
    """The weight of the step in the sums after it."""
    share: Array
    """The derivative of y with respect to v."""
    past_share: Array
    """The derivative of y with respect to the numerator before the step."""
    slope: Array
    """The derivative of y with respect to the step's exponent with its bonus, which is minus the
    derivative with respect to the exponent of the past.
    """


def derivative(operator: Operator, method: str, call: Average, d_call: Average):
    """Returns the results and their tangents."""
    if call.with_sums:  # in a second derivative
        return jax.jvp(scan, (call,), (d_call,))
    (y, before), last = operator(dataclasses.replace(call, with_sums=True), method)
    residuals = Residuals(call.w, call.u, call.k, call.v, y, before, last, call.rows.active)
    tangents = d_call.w, d_call.u, d_call.k, d_call.v, d_call.state
    if method not in LINEAR_RECURRENCE.forms:
        method = "auto"
    d_y, d_last = linear_map(_tangent, _gradient, residuals, tangents, method)
    return ((y, None), last), ((d_y, None), d_last)


def _tangent(method: str, residuals: Residuals, tangents):
    """Computes the forward-mode derivative by linear recurrences, scaled by the maxima."""
    _, _, k, v, y, before, _, _ = residuals = residuals.cast_inputs()
    d_w, d_u, d_k, d_v, d_state = tangents
    d_w, d_u = broadcast_like(d_w, k), broadcast_like(d_u, k)
    d_k, d_v = d_k.astype(k.dtype), d_v.astype(k.dtype)
    factors = residuals.factors()
    through = partial(linear_recurrence, method=method)

    def before_each(first, after):
        return jnp.concatenate([first[:, None], after[:, :-1]], axis=1)

    # The tangent of the maximum: that of k where a step sets a new maximum, otherwise it only
    # decays.
    d_max, d_last_max = through(
        jnp.where(factors.new_is_larger, 0.0, jnp.ones_like(k)),
        jnp.where(factors.new_is_larger, d_k, residuals.where_active(-d_w)),
        d_state.max,
    )
    # The tangents of num and den are a recurrence with the same factors as the sums themselves.
    d_max_before = before_each(d_state.max, d_max)
    d_old = factors.decay * jnp.where(factors.new_is_larger, d_max_before - d_w - d_k, 0)
    d_new = factors.weight * jnp.where(factors.new_is_larger, 0, d_k - d_max)
    d_num = d_old * before.num + d_new * v + factors.weight * d_v
    d_den = d_old * before.den + d_new
    sums, last = jax.vmap(through, in_axes=(None, 0, 0))(
        factors.decay, jnp.stack([d_num, d_den]), jnp.stack([d_state.num, d_state.den])
    )
    # The tangent of the output, a quotient of the sums before the step and the step itself.
    d_num, d_den = map(before_each, d_state[:2], sums)
    d_y = factors.past_share * (d_num - y * d_den) + factors.share * d_v
    d_y = d_y + factors.slope * (d_k + d_u - d_max_before)
    return d_y, WKVState(last[0], last[1], d_last_max)


def _gradient(method: str, residuals: Residuals, gradients):
    """The transpose of `_tangent`."""
    inputs_dtype = residuals.k.dtype
    _, _, k, v, y, before, _, _ = residuals = residuals.cast_inputs()
    y_gradient, last_gradient = residuals.where_active(gradients[0]), gradients[1]
    # Factors, k, v, y and their gradients are (batch, time, features).
    factors = residuals.factors()
    through = partial(linear_recurrence, reverse=True, method=method)

    # Compute the gradients of num and den, (2, batch, time, features), from the last step to the
    # first.
    then = residuals.zero_where_empty(factors.past_share * y_gradient)
    end = jnp.stack(last_gradient[:2])  # (2, batch, features)
    sums, first = jax.vmap(through, in_axes=(None, 0, 0))(
        factors.decay, jnp.stack([then, residuals.zero_where_empty(-then * y)]), end
    )
    num, den = jnp.concatenate([sums[:, :, 1:], end[:, :, None]], axis=2)  # after each step

    # The gradient with respect to the exponent of the sums after a step is divided between the
    # step's exponent and the exponent before it. The smaller part is computed directly, and the
    # larger part as the difference, because computing the larger part directly would be inaccurate.
    u_gradient = factors.slope * y_gradient
    of_new = factors.weight * (num * v + den)
    of_old = factors.decay * (num * before.num + den * before.den)
    smaller = jnp.where(factors.new_is_larger, of_old, -of_new)
    exponent, first_exponent = through(
        jnp.where(factors.new_is_larger, 0.0, jnp.ones_like(k)),
        residuals.zero_where_empty(smaller - u_gradient),
        last_gradient.max,
    )
    exponent = jnp.concatenate([exponent[:, 1:], last_gradient.max[:, None]], axis=1)
    k_gradient = u_gradient + jnp.where(factors.new_is_larger, exponent - of_old, of_new)
    v_gradient = factors.share * y_gradient + factors.weight * num
    kept = jnp.where(factors.new_is_larger, of_old, exponent - of_new)
    return (
        -_sum_steps(residuals.where_active(kept)),  # (features,)
        _sum_steps(u_gradient),
        k_gradient.astype(inputs_dtype),
        v_gradient.astype(inputs_dtype),
        WKVState(first[0], first[1], first_exponent),
    )


def _exp(x):
    """The exponential of a number that is ≤ 0 apart from rounding errors."""
    return jnp.exp(jnp.minimum(x, 0))


def _sum_steps(x):
    return jnp.sum(x, axis=(0, 1))
