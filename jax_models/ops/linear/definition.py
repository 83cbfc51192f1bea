"""The diagonal linear recurrence as its equation."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Inexact

from jax_models.ops.rows import Rows, steps_first


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recurrence:
    """A call of `ops.linear_recurrence`, with h0 in the dtype of the accumulation."""

    a: Inexact[Array, "batch time features"]
    b: Inexact[Array, "batch time features"]
    h0: Inexact[Array, "batch features"]
    rows: Rows = Rows()
    reverse: bool = dataclasses.field(default=False, metadata={"static": True})
    shifted: bool = dataclasses.field(default=False, metadata={"static": True})
    """Whether step t uses the factor of the step before it in the scan, as the gradient does. The
    first step then has no factor, and needs none, because h0 is zero.
    """

    @property
    def end(self) -> int:
        """The index of the step that runs last."""
        return 0 if self.reverse else -1

    def without_masks(self) -> "Recurrence":
        """Factors of 0 restart the state, and factors of 1 keep it in the padding."""
        a, b = self.a, self.b
        restarts = self.rows.restarts(reverse=self.reverse)
        if restarts is not None:
            a = jnp.where(restarts[..., None], 0, a)
        if self.rows.active is not None:
            active = self.rows.active[..., None]
            a, b = jnp.where(active, a, 1), jnp.where(active, b, 0)
        return dataclasses.replace(self, a=a, b=b, rows=Rows())


@jax.jit  # else eager calls would compile the scan each time
def scan(call: Recurrence) -> Inexact[Array, "batch time features"]:
    """Runs `h_t = a_t ⊙ h_{t−1} + b_t` for one t after the other, and returns all h.

    At a restart, h_{t−1} is zero. Steps in the padding leave h unchanged.
    """

    def step(h, now):
        a, b, active, restarts = now
        before = h if restarts is None else jnp.where(restarts[:, None], 0, h)
        new = a * before + b
        h = new if active is None else jnp.where(active[:, None], new, h)
        return h, h

    a, b = call.a.astype(call.h0.dtype), call.b.astype(call.h0.dtype)
    masks = call.rows.active, call.rows.restarts(reverse=call.reverse)
    _, h = lax.scan(step, call.h0, steps_first((a, b, *masks)), reverse=call.reverse)
    return jnp.swapaxes(h, 0, 1)


@jax.custom_jvp
def advance(a, h, b):
    """`a h + b`, or b if a is 0, even if h is NaN."""
    return jnp.where(a == 0, b, a * h + b)


@advance.defjvp
def _advance_jvp(primals, tangents):
    """`a dh + (da h + db)`. JAX would derive that da has no effect where a is 0."""
    a, h, b = primals
    d_a, d_h, d_b = tangents
    dropped = (a == 0) & ~jnp.isfinite(h)
    return advance(a, h, b), advance(a, d_h, d_a * jnp.where(dropped, 0, h) + d_b)
