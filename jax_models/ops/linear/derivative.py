"""The derivative of the diagonal linear recurrence, which consists of linear recurrences.

g_t = ∂L/∂h_t + a_{t+1} ⊙ g_{t+1},   ∂L/∂b_t = g_t,   ∂L/∂a_t = g_t ⊙ h_{t−1}
"""

import dataclasses

import jax
import jax.numpy as jnp

from jax_models.ops.forms import Operator
from jax_models.ops.linear.definition import Recurrence, advance
from jax_models.ops.linear_map import linear_map


def derivative(operator: Operator, method: str, call: Recurrence, d_call: Recurrence):
    """Returns all h and their tangents. Only a and h are stored for the backward pass."""
    call, d_call = jax.jvp(_plain, (call,), (d_call,))
    h = operator(call, method)
    residuals, tangents = (call.a, h, call.h0), (d_call.a, d_call.b, d_call.h0)
    static = operator, method, call.reverse
    return h, linear_map(_tangent, _gradient, residuals, tangents, *static)


def _plain(call: Recurrence) -> Recurrence:
    """Replaces masks by factors, and moves the factors of a shifted recurrence to their steps."""
    call = call.without_masks()
    if not call.shifted:
        return call
    a = jnp.roll(call.a, -1 if call.reverse else 1, axis=1)
    return dataclasses.replace(call, a=a, shifted=False)


def _tangent(operator: Operator, method: str, reverse: bool, residuals, tangents):
    """`dh_t = a_t dh_{t−1} + (da_t h_{t−1} + db_t)`, the same recurrence."""
    a, h, h0 = residuals
    d_a, d_b, d_h0 = tangents
    d_b = d_a.astype(h.dtype) * _before(h, h0, reverse) + d_b.astype(h.dtype)
    return operator(Recurrence(a, d_b, d_h0, reverse=reverse), method)


def _gradient(operator: Operator, method: str, reverse: bool, residuals, h_gradient):
    """The transpose of `_tangent`: the recurrence in the other direction."""
    a, h, h0 = residuals
    zero = jnp.zeros_like(h_gradient[:, 0])
    backwards = Recurrence(a, h_gradient, zero, reverse=not reverse, shifted=True)
    g = operator(backwards, method)
    first = -1 if reverse else 0
    h0_gradient = advance(a[:, first].astype(g.dtype), g[:, first], zero)
    a_gradient = g * _before(h, h0, reverse)
    return a_gradient.astype(a.dtype), g.astype(a.dtype), h0_gradient


def _before(h, h0, reverse: bool):
    """The state before each step."""
    if reverse:
        return jnp.concatenate([h[:, 1:], h0[:, None]], axis=1)
    return jnp.concatenate([h0[:, None], h[:, :-1]], axis=1)
