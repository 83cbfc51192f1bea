"""The calls of the delta rules, as their forms receive them."""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jax_models.ops.l2_normalize import l2_normalize

LOWEST_LOG_DECAY = -1e5
"""A log decay whose exponential is zero in every dtype.

Lower log decays, such as −∞, are raised to it.
"""

Results = tuple[Float[Array, "batch time heads value"], Float[Array, "batch heads value key"]]
"""All y and the last S."""


class Steps(NamedTuple):
    """The arrays of `ops.delta_rule` that have a value for each step."""

    r: Float[Array, "batch time heads key"]
    log_w: Float[Array, "batch time heads key"]
    k: Float[Array, "batch time heads key"]
    v: Float[Array, "batch time heads value"]
    a: Float[Array, "batch time heads key"] | None = None
    b: Float[Array, "batch time heads key"] | None = None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("steps", "state", "u", "reset"),
    meta_fields=("min_log_w",),
)
@dataclasses.dataclass(frozen=True)
class DeltaRule:
    """A call of `ops.delta_rule`, whose arguments it contains. All arrays have the same dtype."""

    steps: Steps
    state: Float[Array, "batch heads value key"]
    u: Float[Array, "heads key"] | None
    min_log_w: float
    reset: Bool[Array, "batch time"] | None = None

    def without_reset(self) -> "DeltaRule":
        """Returns a call whose steps forget the state before each reset by themselves."""
        if self.reset is None:
            return self
        restart, steps = self.reset[..., None, None], self.steps
        steps = steps._replace(log_w=jnp.where(restart, LOWEST_LOG_DECAY, steps.log_w))
        if steps.a is not None:
            steps = steps._replace(a=jnp.where(restart, 0, steps.a))
        if self.u is not None:
            steps = steps._replace(r=jnp.where(restart, 0, steps.r))
        return dataclasses.replace(self, steps=steps, reset=None)

    def with_bonus(self, y: Float[Array, "batch time heads value"]) -> Array:
        """Adds what r reads from the current step, whose keys u scales."""
        if self.u is None:
            return y
        r, k = self.steps.r, self.steps.k
        return y + self.steps.v * jnp.sum(r * self.u[None, None] * k, axis=-1, keepdims=True)


class GatedSteps(NamedTuple):
    """The arrays of `ops.gated_delta_rule` that have a value for each step."""

    q: Float[Array, "batch time key_heads key"]
    k: Float[Array, "batch time key_heads key"]
    v: Float[Array, "batch time heads value"]
    log_w: Float[Array, "batch time heads 1"] | Float[Array, "batch time heads key"]
    """One for each head, or for each feature of its keys."""
    beta: Float[Array, "batch time heads 1"] | None
    """None: what the state holds under a key is not corrected."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("steps", "state", "reset"),
    meta_fields=("normalize", "scale"),
)
@dataclasses.dataclass(frozen=True)
class GatedDeltaRule:
    """A call of `ops.gated_delta_rule`, whose arguments it contains."""

    steps: GatedSteps
    state: Float[Array, "batch heads value key"]
    normalize: bool
    scale: float
    reset: Bool[Array, "batch time"] | None = None

    min_log_w = LOWEST_LOG_DECAY

    @property
    def decays_by_feature(self) -> bool:
        """Whether each feature of a key has a decay of its own."""
        return self.steps.log_w.shape[-1] > 1

    def without_reset(self) -> "GatedDeltaRule":
        """Returns a call whose steps forget the state before each reset by themselves."""
        if self.reset is None:
            return self
        restart, log_w = self.reset[..., None, None], self.steps.log_w
        steps = self.steps._replace(log_w=jnp.where(restart, LOWEST_LOG_DECAY, log_w))
        return dataclasses.replace(self, steps=steps, reset=None)

    def prepared(self, steps: GatedSteps) -> GatedSteps:
        """Casts steps to the dtype of the state, and normalizes and scales queries and keys."""
        steps = jax.tree.map(lambda x: x.astype(self.state.dtype), steps)
        q, k = steps.q, steps.k
        q, k = (l2_normalize(q), l2_normalize(k)) if self.normalize else (q, k)
        return steps._replace(q=self.scale * q, k=k)


def by_head(steps: GatedSteps) -> GatedSteps:
    """Repeats queries and keys for all heads that they serve."""
    served = steps.v.shape[2] // steps.k.shape[2]
    q, k = (jnp.repeat(x, served, axis=2) for x in (steps.q, steps.k))
    return steps._replace(q=q, k=k)
