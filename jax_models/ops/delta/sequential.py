"""The form "sequential": a loop that reads the state once in each step, and its derivative."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_models.ops.affine import einsum
from jax_models.ops.delta.calls import DeltaRule, GatedDeltaRule, Results, Steps, by_head
from jax_models.ops.delta.definition import over_time
from jax_models.ops.linear_map import linear_map
from jax_models.ops.shard_map_axes import match_varying_axes


def pays(call: DeltaRule, platform: str, differentiated: bool) -> bool:
    """Whether the loop is likely to be faster than the definition.

    Without a correction, the forward pass of the definition already reads each state only once.
    """
    return differentiated or call.steps.a is not None or call.u is not None


def run(call: DeltaRule) -> Results:
    """Runs the delta rule."""
    y, last = _run(call.u is None, call.without_reset().steps, call.state)
    return call.with_bonus(y), last


def gated_pays(call: GatedDeltaRule, platform: str, differentiated: bool) -> bool:
    """Whether the loop is likely to be faster than the definition, as in `pays`."""
    return differentiated or call.steps.beta is not None


def run_gated(call: GatedDeltaRule) -> Results:
    """Runs the gated delta rule as a delta rule, which reads the decayed state to correct it."""
    q, k, v, log_w, beta = by_head(call.prepared(call.without_reset().steps))
    log_w = jnp.broadcast_to(log_w, k.shape)
    if beta is None:
        return _run(True, Steps(q, log_w, k, v), call.state)
    learned = beta * k
    return _run(True, Steps(q, log_w, learned, v, jnp.exp(log_w) * k, -learned), call.state)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run(reads_after: bool, xs: Steps, state: Array) -> Results:
    """Runs one step after the other, and reads the state only once in each.

    If an output reads the state after its step, it is computed together with the next step's
    correction, because a product with one vector takes nearly as long as a product with two.
    """

    def at(t, x):
        return lax.dynamic_index_in_dim(x, t, axis=1, keepdims=False)

    def step(t, carry):
        state, y = carry
        x, read = jax.tree.map(partial(at, t), inputs), lax.max(t - 1, 0) if reads_after else t
        of_r, of_a = _read_by_both(state, at(read, xs.r), x.a)
        y = lax.dynamic_update_index_in_dim(y, of_r, read, axis=1)
        return _after(state, x, of_a), y

    inputs, time = _Inputs.of(xs), xs.k.shape[1]
    y = match_varying_axes((jnp.zeros(xs.v.shape, state.dtype), xs))[0]
    state, y = lax.fori_loop(0, time, step, (state.mT, y))
    if reads_after:
        y = lax.dynamic_update_index_in_dim(y, _read(state, at(time - 1, xs.r)), time - 1, axis=1)
    return y, state.mT


@_run.defjvp
def _run_jvp(reads_after: bool, primals, tangents):
    return jax.jvp(partial(_by_segment, reads_after), primals, tangents)


def _by_segment(reads_after: bool, xs: Steps, state: Array) -> Results:
    """Computes the same as `_run`, in a form that is fast to differentiate."""
    r, state = xs.r, state.mT
    if reads_after:
        xs = xs._replace(r=jnp.concatenate([jnp.zeros_like(r[:, :1]), r[:, :-1]], axis=1))
    y, last = over_time(_step, state, _Inputs.of(xs))
    if reads_after:
        y = jnp.concatenate([y[:, 1:], _read(last, r[:, -1])[:, None]], axis=1)
    return y, last.mT


class _Inputs(NamedTuple):
    """`Steps` with the decays instead of their logarithms.

    The exponentials are computed before the loop. Inside the loop, XLA's CPU backend would compute
    one for each element of the state.
    """

    r: Array
    w: Array
    k: Array
    v: Array
    a: Array | None
    b: Array | None

    @classmethod
    def of(cls, xs: Steps) -> "_Inputs":
        """Computes the inputs of the loop from steps."""
        return cls(*xs._replace(log_w=jnp.exp(xs.log_w)))


@jax.custom_jvp
def _step(state: Array, x: _Inputs) -> tuple[Array, Array]:
    """Returns the transposed state after a step, and what r reads from the state before it."""
    after, of_r, _ = _step_and_correction(state, x)
    return after, of_r


@_step.defjvp
def _step_jvp(primals, tangents):
    after, of_r, of_a = _step_and_correction(*primals)
    return (after, of_r), linear_map(_step_tangent, _step_gradient, (*primals, of_a), tangents)


def _step_and_correction(state: Array, x: _Inputs) -> tuple[Array, Array, Array | None]:
    """Returns the results of `_step`, and what a reads from the state."""
    of_r, of_a = _read_by_both(state, x.r, x.a)
    return _after(state, x, of_a), of_r, of_a


def _after(state: Array, x: _Inputs, of_a: Array | None) -> Array:
    after = state * x.w[..., None] + _outer(x.k, x.v)
    return after if x.b is None or of_a is None else after + _outer(x.b, of_a)


def _step_tangent(residuals, tangents):
    state, x, _ = residuals
    after, of_r, _ = jax.jvp(_step_and_correction, (state, x), tangents)[1]
    return after, of_r


def _step_gradient(residuals, gradients):
    """Transposes `_step_tangent`, with all sums as matrix products, which are fast on a CPU."""
    (state, x, of_a), (after, y) = residuals, gradients
    before = after * x.w[..., None] + _outer(x.r, y)
    w = einsum("bhkv,bhkv->bhk", after, state)
    v, of_b = _read_by_both(after, x.k, x.b)
    if of_b is not None:
        before += _outer(x.a, of_b)
    r, a = _read_values_by_both(state, y, of_b)
    k, b = _read_values_by_both(after, x.v, of_a)
    return before, _Inputs(r, w, k, v, a, b)


def _read(state: Array, r: Array) -> Array:
    return einsum("bhk,bhkv->bhv", r, state)


def _read_by_both(state: Array, r: Array, a: Array | None) -> tuple[Array, Array | None]:
    """Reads the state with r and a at once, which takes little longer than reading with one."""
    if a is None:
        return _read(state, r), None
    found = einsum("bhck,bhkv->bhcv", jnp.stack([r, a], axis=-2), state)
    return found[..., 0, :], found[..., 1, :]


def _read_values_by_both(state: Array, v: Array, u: Array | None) -> tuple[Array, Array | None]:
    """Does the same as `_read_by_both` along the axis of the values."""
    if u is None:
        return einsum("bhkv,bhv->bhk", state, v), None
    found = einsum("bhkv,bhcv->bhkc", state, jnp.stack([v, u], axis=-2))
    return found[..., 0], found[..., 1]


def _outer(k: Array, v: Array) -> Array:
    return k[..., :, None] * v[..., None, :]
