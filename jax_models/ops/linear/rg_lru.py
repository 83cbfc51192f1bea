"""The real-gated linear recurrent unit's recurrence."""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_models.checks.arguments import checked
from jax_models.checks.values import checked_positive
from jax_models.ops.affine import affine
from jax_models.ops.linear import LinearRecurrenceMethod, linear_recurrence
from jax_models.ops.rows import DividedScanMasks

LARGEST_SLOPE = 1000.0
"""The largest derivative of the square root in `softplus_decay`."""


class RGLRUState(NamedTuple):
    """The state of an RG-LRU."""

    h: Float[Array, "batch features"]
    """The hidden state."""
    position: Int[Array, " batch"] | None = None
    """The number of steps of the document so far. None if first steps are like all others."""


@checked()
def rg_lru(
    x: Float[Array, "batch time features"],
    state: RGLRUState,
    *,
    a: Float[Array, " blocks*block"] | None = None,
    a_param: Float[Array, " blocks*block"] | None = None,
    input_kernel: Float[Array, "*blocks block block"],
    input_bias: Float[Array, "*blocks block"] | None = None,
    recurrence_kernel: Float[Array, "*blocks block block"],
    recurrence_bias: Float[Array, "*blocks block"] | None = None,
    first: Bool[Array, "batch time"] | None = None,
    c: float | Float[Array, ""] = 8.0,
    epsilon: float = 0.0,
    method: LinearRecurrenceMethod = "auto",
    **masks: Unpack[DividedScanMasks],
) -> tuple[Float[Array, "batch time features"], RGLRUState]:
    """The RG-LRU.

        i_t = σ(x_t W_i + b_i)
        r_t = σ(x_t W_r + b_r)
        a_t = a^(c·r_t)
        h_t = a_t ⊙ h_{t−1} + √(1 − a_t²) ⊙ (i_t ⊙ x_t)

    Give either `a` or, as in recurrentgemma, `a_param`, with a = e^{−softplus(a_param)}. With
    `a_param`, `epsilon` is added under the root. Kernels (blocks, block, block) are the blocks of
    block-diagonal matrices. At the `first` steps of documents, √(1 − a_t²) is replaced with 1.
    `masks` are those of `linear_recurrence`. The position of `state` is ignored, and the new state
    has none.
    """
    if not isinstance(c, Array):
        checked_positive("c", c)
    i = jax.nn.sigmoid(affine(x, input_kernel, _flat(input_bias)))
    r = jax.nn.sigmoid(affine(x, recurrence_kernel, _flat(recurrence_bias)))
    if a is not None and a_param is None:
        a_t, complement = decay(a.astype(r.dtype), c * r)
    elif a_param is not None and a is None:
        a_t, complement = softplus_decay(a_param.astype(r.dtype), c * r, epsilon)
    else:
        raise ValueError("a, a_param: expected one of them")
    if first is not None:
        complement = jnp.where(first[..., None], 1, complement)
    h, last = linear_recurrence(
        a_t, complement * (i * x.astype(i.dtype)), state.h, method=method, **masks
    )
    return h, RGLRUState(last)


def _flat(bias: Array | None) -> Array | None:
    return None if bias is None else bias.reshape(-1)


@checked()
def decay(
    a: Float[Array, " features"], exponent: Float[Array, "*steps features"]
) -> tuple[Float[Array, "*steps features"], Float[Array, "*steps features"]]:
    """`a^e` and `√(1 − a^{2e})` for e ≥ 0 and a, which is clipped to [0, 1].

    If a^e is near 1, `1 − a^{2e}` would be inaccurate, so it is computed as `−expm1(2 e log a)`.
    With p = a^e and m = √(1 − p²) the derivatives are

        ∂p/∂a = e a^{e−1},   ∂p/∂e = p log a,   ∂m = −(p / m) ∂p

    The first is infinite at a = 0 (if e < 1), and the last at m = 0, where a = 1 or e = 0. To keep
    them finite, a is replaced with at least ε and m with at least √ε in the derivatives, where ε is
    the spacing of the dtype at 1. This changes the derivatives only where 1 − p² cannot be
    distinguished from zero; elsewhere they are exact. An `a` outside [0, 1] has the derivative of
    the nearest end.
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


@checked()
def softplus_decay(
    a_param: Float[Array, " features"],
    exponent: Float[Array, "*steps features"],
    epsilon: float = 0.0,
) -> tuple[Float[Array, "*steps features"], Float[Array, "*steps features"]]:
    """`a^e` and `√(1 − a^{2e} + ε)` for e ≥ 0 and a = e^{−softplus(a_param)}.

    The result is accurate even if `a` is near 1. The derivative of the square root is at most 1000,
    as in recurrentgemma.
    """
    log = -exponent * jnp.broadcast_to(jax.nn.softplus(a_param), exponent.shape)
    return jnp.exp(log), _bounded_sqrt(epsilon - jnp.expm1(2 * log))


@jax.custom_jvp
def _bounded_sqrt(x):
    return jnp.sqrt(x)


@_bounded_sqrt.defjvp
def _bounded_sqrt_jvp(primals, tangents):
    (x,), (x_tangent,) = primals, tangents
    root = jnp.sqrt(x)
    return root, x_tangent * (0.5 / jnp.maximum(root, 1 / (2 * LARGEST_SLOPE)))
