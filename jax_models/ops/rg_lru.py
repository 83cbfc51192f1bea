"""The real-gated linear recurrent unit's recurrence."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_models.ops.affine import affine
from jax_models.ops.checks import checked, checked_positive
from jax_models.ops.linear_recurrence import LinearRecurrenceMethod, linear_recurrence


class RGLRUState(NamedTuple):
    """What an RG-LRU carries: the hidden state h."""

    h: Float[Array, "batch features"]


@checked()
def rg_lru(
    x: Float[Array, "batch time features"],
    state: RGLRUState,
    *,
    a: Float[Array, " features"],
    input_kernel: Float[Array, "features features"],
    recurrence_kernel: Float[Array, "features features"],
    c: float = 8.0,
    method: LinearRecurrenceMethod = "auto",
    **masks,
) -> tuple[Float[Array, "batch time features"], RGLRUState]:
    """The RG-LRU.

        i_t = σ(x_t W_i)
        r_t = σ(x_t W_r)
        a_t = a^(c·r_t)
        h_t = a_t ⊙ h_{t−1} + √(1 − a_t²) ⊙ (i_t ⊙ x_t)

    `masks` are `lengths`, `reset` and `reverse`, as in `linear_recurrence`.
    """
    checked_positive("c", c)
    i = jax.nn.sigmoid(affine(x, input_kernel))
    r = jax.nn.sigmoid(affine(x, recurrence_kernel))
    a_t, complement = decay(a.astype(r.dtype), c * r)
    h, last = linear_recurrence(
        a_t, complement * (i * x.astype(i.dtype)), state.h, method=method, **masks
    )
    return h, RGLRUState(last)


@checked()
def decay(
    a: Float[Array, " features"], exponent: Float[Array, "*steps features"]
) -> tuple[Float[Array, "*steps features"], Float[Array, "*steps features"]]:
    """`a^e` and `√(1 − a^{2e})` for e ≥ 0 and a in [0, 1]; another a counts as the nearest in it.

    Where a^e is near 1, `1 − a^{2e}` would lose all its digits; `−expm1(2 e log a)` loses none.
    With p = a^e and m = √(1 − p²) the derivatives are

        ∂p/∂a = e a^{e−1},   ∂p/∂e = p log a,   ∂m = −(p / m) ∂p

    of which the first is infinite at a = 0 (if e < 1) and the last at m = 0, where a = 1 or e = 0.
    With ε the dtype's spacing at 1, the derivatives are taken as if a ≥ ε and m ≥ √ε, a distance
    from the ends at which 1 − p² is no longer told from zero: there they are finite, elsewhere
    exact. An `a` outside [0, 1] gets the derivative at the end next to it.
    """
    return _decay(a, exponent)


@jax.custom_jvp
def _decay(a, exponent):
    log_a = jnp.broadcast_to(jnp.log(jnp.clip(a, 0, 1)), exponent.shape)
    log = jnp.where(exponent == 0, 0, exponent * log_a)  # 0⁰ = 1
    return jnp.exp(log), jnp.sqrt(-jnp.expm1(2 * log))


@_decay.defjvp
def _decay_jvp(primals, tangents):
    a, exponent = primals
    a_tangent, exponent_tangent = tangents
    p, m = _decay(a, exponent)
    epsilon = jnp.finfo(p.dtype).eps
    log_a = jnp.broadcast_to(jnp.log(jnp.clip(a, epsilon, 1)), p.shape)
    slope = exponent * jnp.exp((exponent - 1) * log_a)
    p_tangent = slope * jnp.broadcast_to(a_tangent, p.shape) + p * log_a * exponent_tangent
    return (p, m), (p_tangent, -p / jnp.maximum(m, epsilon**0.5) * p_tangent)
