"""RWKV-4's weighted average as its equation, with the sums of `jax_models.ops.linear.wkv.sums`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_models.ops.linear.wkv.sums import (
    WKVState,
    add,
    advance,
    broadcast_like,
    clip_to_finite,
    empty_where,
    step_sums,
)
from jax_models.ops.rows import Rows, steps_first

Output = tuple[Array, WKVState | None]
"""The y of a step and, if the call asks for them, the sums before the step."""
Results = tuple[Output, WKVState]
"""The outputs of all steps, and the last sums."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Average:
    """A call of `ops.wkv`, with w, u and the state in the dtype of the accumulation."""

    w: Float[Array, " features"]
    u: Float[Array, " features"]
    k: Float[Array, "batch time features"]
    v: Float[Array, "batch time features"]
    state: WKVState
    """The sums before the first step. If they are empty, their exponent is −∞."""
    rows: Rows
    with_sums: bool = dataclasses.field(default=False, metadata={"static": True})
    """Whether the results include the sums before each step."""

    def keys_and_values(self) -> tuple[Array, Array]:
        """Returns k and v in the dtype of the accumulation."""
        return self.k.astype(self.w.dtype), self.v.astype(self.w.dtype)

    def step(self, before: WKVState, now: Any) -> tuple[WKVState, Output]:
        """Returns the sums after a step, and its output. `now` has the step's sums and masks."""
        sums, active, restarts = now
        if restarts is not None:
            before = empty_where(restarts[:, None], before)
        after = advance(broadcast_like(self.w, before.max), before, sums)
        if active is not None:
            after = jax.tree.map(lambda a, b: jnp.where(active[:, None], a, b), after, before)
        return after, output(self.u, before, sums, with_sums=self.with_sums)


def output(u, before: WKVState, now: WKVState, *, with_sums: bool) -> Output:
    """Divides the two sums before a step, to each of which the step with its bonus is added."""
    both = add(before, now._replace(max=clip_to_finite(now.max + broadcast_like(u, now.max))))
    return both.num / both.den, before if with_sums else None


@jax.jit  # else eager calls would compile the scan each time
def scan(call: Average) -> Results:
    """Runs one step after the other.

    At a restart, the sums before the step are empty. Steps in the padding leave them unchanged.
    """
    xs = step_sums(*call.keys_and_values()), call.rows.active, call.rows.reset
    last, results = lax.scan(call.step, call.state, steps_first(xs))
    return steps_first(results), last
