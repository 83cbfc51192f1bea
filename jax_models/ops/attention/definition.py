"""Attention as a softmax over all scores."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_models.ops.affine import carry_dtype


class LocalAttentionState(NamedTuple):
    """The state of attention: the keys and values of the last steps of the document.

    The key and value of position p of the document are in slot p mod (number of slots).
    """

    position: Int[Array, " batch"]
    """Number of steps of the document so far."""
    keys: Float[Array, "batch slots kv_heads head_features"]
    values: Float[Array, "batch slots kv_heads value_features"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CausalAttention:
    """The attention of each step t over the steps `first[t]` … t.

    If k and v have no steps, each step sees the `past` alone.
    """

    q: Float[Array, "batch time heads head_features"]
    k: Float[Array, "batch keys kv_heads head_features"]
    """Each head is shared by `heads / kv_heads` neighboring heads of q."""
    v: Float[Array, "batch keys kv_heads value_features"]
    first: Int[Array, "batch time"]
    """The first step that each step sees. Negative if the step sees some of the `past`."""
    past: LocalAttentionState
    """The keys and values of earlier steps. It may have no slots."""
    window: int = dataclasses.field(metadata={"static": True})
    """The largest number of steps that a step sees, including itself."""


@jax.jit  # else each operation of an eager call would be compiled by itself
def run(call: CausalAttention) -> Float[Array, "batch time heads value_features"]:
    """Computes the scores of all steps and all keys, past and new."""
    return masked_attention(call.q, *keys_and_mask(call))


def keys_and_mask(call: CausalAttention) -> tuple[Array, Array, Bool[Array, "batch time keys"]]:
    """Returns the keys and values, past and new, and which of them each step sees."""
    first, past, slots = call.first, call.past, call.past.keys.shape[1]
    steps = jnp.arange(call.q.shape[1], dtype=first.dtype)
    slot = jnp.arange(slots, dtype=first.dtype)
    own = jnp.broadcast_to(steps[: call.k.shape[1]], (first.shape[0], call.k.shape[1]))
    of_keys = jnp.concatenate([past_steps(slot, past.position, slots), own], axis=1)
    pairs = (past.keys, call.k), (past.values, call.v)
    k, v = (jnp.concatenate([old.astype(new.dtype), new], axis=1) for old, new in pairs)
    seen = (of_keys[:, None] >= first[..., None]) & (of_keys[:, None] <= steps[None, :, None])
    return k, v, seen


def masked_attention(
    q: Float[Array, "batch time heads head_features"],
    k: Float[Array, "batch keys kv_heads head_features"],
    v: Float[Array, "batch keys kv_heads value_features"],
    mask: Bool[Array, "batch time keys"],
    dropout: Callable[[Array], Array] | None = None,
) -> Float[Array, "batch time heads value_features"]:
    """Computes `softmax(q kᵀ / √head_features) v` of each head, over the keys in a step's mask.

    The output of a head is NaN in the steps whose query, or a key or value in their mask, is not
    finite in this head. It is zero if the mask is empty.
    """
    batch, time, heads, features = q.shape
    groups = (k.shape[2], heads // k.shape[2])
    q_faulty, k_faulty, v_faulty = (~jnp.isfinite(a).all(axis=-1) for a in (q, k, v))
    keys_faulty = k_faulty | v_faulty
    sees_faulty = jnp.any(mask[..., None] & keys_faulty[:, None], axis=2)
    faulty = q_faulty | jnp.repeat(sees_faulty, groups[1], axis=2)
    q = _zero_where(q_faulty, q)
    k, v = (_zero_where(keys_faulty, a) for a in (k, v))  # a weight of 0 times NaN would be NaN

    q = q.reshape(batch, time, *groups, features)
    scores = jnp.einsum("btkgf,bskf->bkgts", q, k, preferred_element_type=carry_dtype(q.dtype))
    scores = scores.reshape(batch, heads, time, k.shape[1])
    # Masked keys are left out of the softmax. With a finite score, they would outweigh keys in the
    # mask whose scores overflow to −∞.
    empty = ~jnp.any(mask, axis=2)
    seen = (mask | empty[..., None])[:, None]
    weights = jax.nn.softmax(scores * features**-0.5, axis=-1, where=seen)
    weights = jnp.where(seen, weights, 0).astype(q.dtype)
    weights = weights if dropout is None else dropout(weights)
    weights = weights.reshape(batch, *groups, time, k.shape[1])
    y = jnp.einsum("bkgts,bskf->btkgf", weights, v).reshape(batch, time, heads, v.shape[3])
    return jnp.where(faulty[..., None], jnp.nan, _zero_where(empty[..., None], y))


def _zero_where(heads: Bool[Array, "batch steps _"], x: Float[Array, "batch steps heads features"]):
    return jnp.where(heads[..., None], 0, x)


def past_steps(
    slot: Int[Array, " keys"], position: Int[Array, " batch"], slots: int
) -> Int[Array, "batch keys"]:
    """The steps of the keys in these slots, relative to the first query and therefore negative."""
    return (slot[None] - position[:, None]) % max(slots, 1) - slots
