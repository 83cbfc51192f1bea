"""Attention with a mask."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jax_models.ops.affine import carry_dtype
from jax_models.ops.arguments import checked


@checked()
def attention(
    q: Float[Array, "batch time heads head_features"],
    k: Float[Array, "batch keys kv_heads head_features"],
    v: Float[Array, "batch keys kv_heads head_features"],
    mask: Bool[Array, "batch time keys"],
    *,
    dropout: Callable[[Array], Array] | None = None,
) -> Float[Array, "batch time heads head_features"]:
    """Computes `softmax(q kᵀ / √head_features) v` of each head, over the keys in a step's mask.

    Each head of k and v is shared by `heads / kv_heads` neighboring heads of q.

    The softmax is in at least float32, and `dropout` is applied to its weights. If the query of a
    step is not finite, or any key or value in its mask, the output of the step is NaN, and other
    steps are unaffected. If the mask of a step contains no key, the output is zero.
    """
    check_heads(q, k)
    q_faulty, k_faulty, v_faulty = (~jnp.all(jnp.isfinite(a), axis=(2, 3)) for a in (q, k, v))
    keys_faulty = k_faulty | v_faulty
    faulty = q_faulty | jnp.any(mask & keys_faulty[:, None], axis=2)
    q = _zero_where(q_faulty, q)
    k, v = (_zero_where(keys_faulty, a) for a in (k, v))  # a weight of 0 times NaN would be NaN
    y = _attention(q, k, v, mask[:, None], dropout)
    y = _zero_where(~jnp.any(mask, axis=2), y)
    return jnp.where(faulty[..., None, None], jnp.nan, y)


def check_heads(q: Array, k: Array) -> None:
    """Raises a ValueError if the heads of q cannot be divided equally among those of k."""
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"k: expected a number of heads that divides the {q.shape[2]} of q, got {k.shape[2]}"
        )


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
