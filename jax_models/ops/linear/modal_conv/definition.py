"""The modal convolution as its equation."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Complex, Float

from jax_models.ops.rows import Rows, steps_first


class ModalConvState(NamedTuple):
    """The state of a modal convolution: the real and imaginary part of each mode."""

    modes: Float[Array, "batch features modes 2"]


Results = tuple[Float[Array, "batch time features"], Complex[Array, "batch features modes"]]
"""The outputs, and the last state."""


class ModalConv(NamedTuple):
    """A call of `ops.modal_conv`, in the dtype of the computation."""

    u: Float[Array, "batch time features"]
    """The inputs, with zeros in the padding."""
    start: Complex[Array, "batch features modes"]
    """The state before the first step."""
    poles: Complex[Array, "features modes"]
    residues: Complex[Array, "features modes"]
    skip: Float[Array, " features"]
    rows: Rows


@jax.jit  # else eager calls would compile the scan each time
def scan(call: ModalConv) -> Results:
    """Runs `s_t = λ ⊙ s_{t−1} + u_t` and `y_t = Re Σ_n R_n s_{t,n} + skip ⊙ u_t` for each t.

    At a restart, s_{t−1} is zero. Steps in the padding leave s unchanged. The features come last,
    so that steps use whole vectors.
    """
    poles, residues = (jnp.moveaxis(z[None], -1, 0) for z in (call.poles, call.residues))

    def step(s, now):
        u, active, restarts = now
        if restarts is not None:
            s = jnp.where(restarts[None, :, None], jnp.zeros_like(s), s)
        new = poles * s + u[None].astype(s.dtype)
        y = jnp.sum((residues * new).real, axis=0) + call.skip[None] * u
        return (new if active is None else jnp.where(active[None, :, None], new, s)), y

    xs = steps_first((call.u, call.rows.active, call.rows.reset))
    last, y = lax.scan(step, jnp.moveaxis(call.start, -1, 0), xs)
    return jnp.swapaxes(y, 0, 1), jnp.moveaxis(last, 0, -1)


def refusal(call: ModalConv) -> str | None:
    """Returns why the scan does not support the call, or None if it does."""
    if call.rows.time_axis is not None:
        return "it does not divide time over devices (time_axis)"
    return None
