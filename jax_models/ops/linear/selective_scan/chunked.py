"""The selective scan in chunks of time, whose backward pass computes the states again.

Only the states between chunks are stored. The gradient with respect to a state is

    g_t = (∂L/∂y_t) C_tᵀ + exp(Δ_{t+1} A) ⊙ g_{t+1}

and the gradients of step t follow from g_t, h_{t−1} and h_t.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_models.ops.affine import einsum
from jax_models.ops.forms import refusal_of_symbolic
from jax_models.ops.linear.selective_scan import definition
from jax_models.ops.linear.selective_scan.definition import (
    Results,
    SelectiveScan,
    Steps,
    kept,
    outer,
    read,
    restarted,
)
from jax_models.ops.linear_map import linear_map
from jax_models.ops.rows import steps_first

CHUNK = 32
"""The largest number of steps in a chunk, whose states fit into a CPU's cache for many sizes."""


class Inputs(NamedTuple):
    """The arrays of a call with respect to which it is differentiated."""

    steps: Steps
    A: Array
    h: Array


def refusal(call: SelectiveScan) -> str | None:
    """Returns why there are no chunks for the call, or None if there are."""
    return refusal_of_symbolic(call.steps.u.shape[1])


def pays(call: SelectiveScan, platform: str, differentiated: bool) -> bool:
    """Whether a derivative is computed: the forward pass runs the definition in each chunk."""
    return differentiated


@jax.jit  # else eager calls would compile the scan each time
def run(call: SelectiveScan) -> Results:
    """Divides time into chunks of equal size, the last of which ends with padding."""
    time = call.steps.u.shape[1]
    count = -(-time // CHUNK)
    size = -(-time // count)

    def padded(x):
        return jnp.pad(x, [(0, 0), (0, count * size - time)] + [(0, 0)] * (x.ndim - 2))

    steps, reset = jax.tree.map(padded, (call.steps, call.reset))
    y, last = _run(size, Inputs(steps, call.A, call.h), reset)
    return y[:, :time], last


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run(size: int, inputs: Inputs, reset: Array | None) -> Results:
    y, last, _ = _forward(size, inputs, reset)
    return y, last


@_run.defjvp
def _run_jvp(size: int, primals, tangents):
    """Stores the inputs and the states before each chunk for the backward pass."""
    inputs, reset = primals
    y, last, starts = _forward(size, inputs, reset)
    residuals = inputs, starts, reset
    return (y, last), linear_map(_tangent, _gradient, residuals, tangents[0], size)


def _forward(size: int, inputs: Inputs, reset: Array | None) -> tuple[Array, Array, Array]:
    """Returns all y, the last h, and the h before each chunk."""

    def chunk(h, steps):
        call = SelectiveScan(steps[0], inputs.A, h, steps[1])
        y, last = definition.scan(call)
        return last, (y, h)

    last, (y, starts) = lax.scan(chunk, inputs.h, _chunks((inputs.steps, reset), size))
    return _joined(y), last, starts


def _tangent(size: int, residuals, tangents: Inputs) -> Results:
    """Forward mode goes through the definition."""
    inputs, _, reset = residuals

    def run(inputs: Inputs) -> Results:
        return definition.scan(SelectiveScan(inputs.steps, inputs.A, inputs.h, reset))

    return jax.jvp(run, (inputs,), (tangents,))[1]


def _gradient(size: int, residuals, gradients: Results) -> Inputs:
    """Runs the chunks backwards, and first computes the states of each again."""
    (steps, A, _), starts, reset = residuals
    of_y, of_last = gradients

    def again(h, now):
        (u, dt, B, _), restart = now
        before = restarted(h, restart)
        return kept(A, dt) * before + outer(B, dt * u), before

    def back(carry, now):
        g, of_A = carry
        before, of_y, ((u, dt, B, C), restart) = now
        factor = kept(A, dt)
        h = factor * before + outer(B, dt * u)
        # y_t = h_t C_t
        of_C = einsum("bnd,bd->bn", h, of_y)
        g = g + outer(C, of_y)
        # h_t = factor h_{t−1} + (Δ_t u_t) B_tᵀ
        of_B = einsum("bnd,bd->bn", g, dt * u)
        of_v = read(g, B)
        g = factor * g
        # factor = exp(Δ_t A)
        of_exponent = g * before
        # On a CPU, XLA would compute the factors again in a plain sum over the state.
        of_dt = read(of_exponent * A[None], jnp.ones_like(B)) + of_v * u
        of_A = of_A + jnp.sum(of_exponent * dt[:, None], axis=0)
        return (restarted(g, restart), of_A), Steps(of_v * dt, of_dt, of_B, of_C)

    def chunk(carry, now):
        start, of_y, chunk_steps = now
        chunk_steps, of_y = steps_first((chunk_steps, of_y))
        _, before = lax.scan(again, start, chunk_steps)
        carry, of_steps = lax.scan(back, carry, (before, of_y, chunk_steps), reverse=True)
        return carry, steps_first(of_steps)

    xs = starts, *_chunks((of_y, (steps, reset)), size)
    (of_h, of_A), of_steps = lax.scan(chunk, (of_last, jnp.zeros_like(A)), xs, reverse=True)
    return Inputs(jax.tree.map(_joined, of_steps), of_A, of_h)


def _chunks(tree: Any, size: int) -> Any:
    """Divides the time of all arrays into chunks, which come first."""

    def chunks(x):
        return jnp.swapaxes(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 0, 1)

    return jax.tree.map(chunks, tree)


def _joined(chunks: Array) -> Array:
    count, batch, size, *others = chunks.shape
    return jnp.swapaxes(chunks, 0, 1).reshape(batch, count * size, *others)
