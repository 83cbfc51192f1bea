"""The gated delta rule: a delta rule whose heads each decay at a single rate."""

from typing import Literal, Unpack

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_models.ops.affine import common_carry_dtype
from jax_models.ops.arguments import checked
from jax_models.ops.delta_rule import delta_rule
from jax_models.ops.l2_normalize import l2_normalize
from jax_models.ops.rows import DividedMasks

GatedDeltaRuleMethod = Literal["auto", "chunked", "sequential", "pallas", "pallas_interpreted"]


@checked()
def gated_delta_rule(
    q: Float[Array, "batch time key_heads key"],
    k: Float[Array, "batch time key_heads key"],
    v: Float[Array, "batch time heads value"],
    log_decay: Float[Array, "batch time heads"],
    beta: Float[Array, "batch time heads"],
    state: Float[Array, "batch heads value key"] | None = None,
    *,
    scale: float = 1.0,
    normalize: bool = False,
    method: GatedDeltaRuleMethod = "auto",
    **masks: Unpack[DividedMasks],
) -> tuple[Float[Array, "batch time heads value"], Float[Array, "batch heads value key"]]:
    """Runs a matrix S per head, which decays, and learns the value of each key at a given rate.

        >>> q, k, v = jnp.ones((3, 8, 100, 4, 64))
        >>> y, state = gated_delta_rule(q, k, v, log_decay, beta, normalize=True, scale=64**-0.5)

        S_t = α_t S_{t−1} + β_t (v_t − α_t S_{t−1} k_t) k_tᵀ,   α_t = exp(log_decay_t)
        y_t = S_t (scale q_t)

    Each key head serves heads / key_heads consecutive heads.

    Args:
        q: the queries.
        k: the keys.
        v: the values.
        log_decay: the logarithm of the decay of each head: at most 0, and −∞ to forget everything.
        beta: the rate at which each head learns: 1 replaces the value of a key of length 1.
        state: S before the first step. None: zero.
        scale: a factor of the queries, key^−1/2 in most models.
        normalize: whether queries and keys are scaled to a length of 1 first, as by `l2_normalize`.
        method: as in `delta_rule`.
        **masks: `lengths`, `reset` and `time_axis`, as in `DividedMasks`. At a `reset`, the state
            restarts from zero.

    Returns:
        All y and the last S, in at least float32. Each y beyond `lengths` is meaningless.

    Raises:
        NotImplementedError: as in `delta_rule`.
        TypeError: the dtype of an array is of another kind.
        ValueError: a shape is wrong, heads is no multiple of key_heads, a length lies outside 0 …
            time, or there is no such method.

    Source: Yang et al. 2024 (Gated DeltaNet, arXiv 2412.06464).

    """
    heads, key_heads = v.shape[2], k.shape[2]
    if heads % key_heads:
        raise ValueError(
            f"v: expected heads to be a multiple of key_heads = {key_heads}, got {heads}"
        )
    arrays = (q, k, v, log_decay, beta, *(() if state is None else (state,)))
    dtype = common_carry_dtype(*arrays)
    q, k, v, log_decay, beta = (x.astype(dtype) for x in arrays[:5])
    if normalize:
        q, k = l2_normalize(q), l2_normalize(k)
    q, k = (jnp.repeat(x, heads // key_heads, axis=2) for x in (q * scale, k))
    log_w = jnp.broadcast_to(log_decay[..., None], k.shape)
    learned = beta[..., None] * k
    corrected = -jnp.exp(log_w) * learned
    return delta_rule(q, log_w, learned, v, k, corrected, state, method=method, **masks)
