"""Attention with a mask, or to earlier steps."""

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jax_models.checks.arguments import checked
from jax_models.checks.values import checked_size
from jax_models.ops.affine import carry_dtype
from jax_models.ops.causal_attention import causal_attention, check_heads


@checked()
def attention(
    q: Float[Array, "batch time heads head_features"],
    k: Float[Array, "batch keys kv_heads head_features"],
    v: Float[Array, "batch keys kv_heads head_features"],
    mask: Bool[Array, "batch time keys"] | None = None,
    *,
    window: Annotated[int, checked_size] | None = None,
    dropout: Callable[[Array], Array] | None = None,
) -> Float[Array, "batch time heads head_features"]:
    """Computes `softmax(q kᵀ / √head_features) v` of each head, over the keys in a step's mask.

        >>> q, k, v = jnp.ones((3, 8, 100, 4, 16))
        >>> y = attention(q, k, v)

    Without a mask, attention is causal: step t sees the steps up to t or, with a `window`, the last
    `window` steps up to t. It is computed tile by tile, also backward, so that memory is linear in
    the number of steps. With a mask or dropout, all scores exist at once.

    Each head of k and v is shared by `heads / kv_heads` neighboring heads of q.

    The softmax is in at least float32, and `dropout` is applied to its weights. If the query of a
    step is not finite, or any key or value in its mask, the output of the step is NaN, and other
    steps are unaffected. If the mask of a step contains no key, the output is zero.

    Raises:
        ValueError: the heads or the shapes do not fit each other, both a mask and a window are
            given, or without a mask, k has another number of steps than q.

    """
    check_heads(q, k)
    if mask is None:
        if k.shape[1] != q.shape[1]:
            raise ValueError(
                f"k: expected the {q.shape[1]} steps of q, because there is no mask, "
                f"got {k.shape[1]}"
            )
        step = jnp.arange(q.shape[1], dtype=jnp.int32)
        first = jnp.zeros_like(step) if window is None else jnp.maximum(step - window + 1, 0)
        if dropout is None:
            first = jnp.broadcast_to(first, q.shape[:2])
            return causal_attention(q, k, v, first, None, window=window or q.shape[1])
        mask = (step[None] <= step[:, None]) & (step[None] >= first[:, None])
        mask = jnp.broadcast_to(mask, (q.shape[0], *mask.shape))
    elif window is not None:
        raise ValueError(f"window: expected None with a mask, got {window}")
    q_faulty, k_faulty, v_faulty = (~jnp.all(jnp.isfinite(a), axis=(2, 3)) for a in (q, k, v))
    keys_faulty = k_faulty | v_faulty
    faulty = q_faulty | jnp.any(mask & keys_faulty[:, None], axis=2)
    q = _zero_where(q_faulty, q)
    k, v = (_zero_where(keys_faulty, a) for a in (k, v))  # a weight of 0 times NaN would be NaN
    y = _attention(q, k, v, mask[:, None], dropout)
    y = _zero_where(~jnp.any(mask, axis=2), y)
    return jnp.where(faulty[..., None, None], jnp.nan, y)


def _zero_where(steps: Bool[Array, "batch steps"], x: Float[Array, "batch steps heads features"]):
    return jnp.where(steps[..., None, None], 0, x)


def _attention(q, k, v, mask: Bool[Array, "batch heads time keys"], dropout):
    batch, time, heads, features = q.shape
    groups = (k.shape[2], heads // k.shape[2])
    q = q.reshape(batch, time, *groups, features)
    scores = jnp.einsum("btkgf,bskf->bkgts", q, k, preferred_element_type=carry_dtype(q.dtype))
    scores = scores.reshape(batch, heads, time, k.shape[1])
    # Masked keys are left out of the softmax. With a finite score, they would outweigh keys in the
    # mask whose scores overflow to −∞.
    seen = mask | ~jnp.any(mask, axis=-1, keepdims=True)  # if empty, the caller returns zero
    weights = jax.nn.softmax(scores * features**-0.5, axis=-1, where=seen)
    weights = jnp.where(seen, weights, 0).astype(q.dtype)
    weights = weights if dropout is None else dropout(weights)
    weights = weights.reshape(batch, *groups, time, k.shape[1])
    return jnp.einsum("bkgts,bskf->btkgf", weights, v).reshape(batch, time, heads, features)
