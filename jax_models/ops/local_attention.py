"""Causal attention over a window."""

from typing import NamedTuple, Unpack

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_models.ops.arguments import checked
from jax_models.ops.causal_attention import Past, causal_attention
from jax_models.ops.rows import DividedMasks, at_end, given_rows, positions_after
from jax_models.ops.time_axis import states_between


class LocalAttentionState(NamedTuple):
    """The state of local attention: the keys and values of the last window − 1 steps.

    The key and value of position p of the document are in slot p mod (window − 1).
    """

    position: Int[Array, " batch"]
    """Number of steps of the document so far."""
    keys: Float[Array, "batch slots kv_heads head_features"]
    values: Float[Array, "batch slots kv_heads head_features"]


@checked()
def local_attention(
    q: Float[Array, "batch time heads head_features"],
    k: Float[Array, "batch time kv_heads head_features"],
    v: Float[Array, "batch time kv_heads head_features"],
    state: LocalAttentionState,
    **masks: Unpack[DividedMasks],
) -> tuple[Float[Array, "batch time heads head_features"], LocalAttentionState]:
    """Computes the `attention` of each step over itself and the window − 1 steps before it.

    Steps do not see other documents. The window is the number of slots of the state plus one, and T
    steps cost O(T · window) operations. The backward pass recomputes the scores, tile by tile, so
    only q, k, v and the scores of one tile need memory. If a query or anything that it sees is not
    finite, its output in that head is NaN; the outputs of other steps are unaffected.

    With a `time_axis`, each device gathers the keys and values of all devices and keeps those of
    its window. `lengths` must then be None.
    """
    rows = given_rows(masks)

    def after(piece: tuple[Array, Array, Array | None], state: LocalAttentionState):
        return _written(state, *piece, rows.lengths)

    # Over devices, the keys and values before this device's steps come from the other devices.
    if rows.time_axis is None:
        last = after((k, v, rows.reset), state)
    else:
        state, last = states_between(after, (k, v, rows.reset), state, rows.time_axis)
    # Steps are numbered relative to the first query, so those of the past are negative.
    slots = state.keys.shape[1]
    positions = positions_after(state.position, q.shape[1], rows.reset)
    steps = jnp.arange(q.shape[1], dtype=positions.dtype)[None]
    first = steps - jnp.minimum(positions, slots)
    slot = jnp.arange(slots, dtype=positions.dtype)[None]
    past = Past(
        state.keys.astype(k.dtype),
        state.values.astype(v.dtype),
        (slot - state.position[:, None]) % max(slots, 1) - slots,
        jnp.any(state.position > 0),
    )
    return causal_attention(q, k, v, first, past, window=slots + 1), last


def _written(
    state: LocalAttentionState,
    k: Float[Array, "batch time kv_heads head_features"],
    v: Float[Array, "batch time kv_heads head_features"],
    reset: Bool[Array, "batch time"] | None,
    lengths: Int[Array, " batch"] | None,
) -> LocalAttentionState:
    """Returns the state after the steps: the last keys and values of each row's last document."""
    batch_size, time, *_ = k.shape
    positions = positions_after(state.position, time, reset)
    position = at_end(state.position, positions + 1, lengths)
    slots = state.keys.shape[1]
    if not slots:
        return state._replace(position=position)
    step = jnp.arange(time, dtype=position.dtype)[None]
    end = time if lengths is None else lengths[:, None].astype(position.dtype)
    kept = (step < end) & (step >= end - jnp.minimum(position, slots)[:, None])
    rows = jnp.arange(batch_size, dtype=position.dtype)[:, None]
    index = jnp.where(kept, positions % slots, slots)

    def written(cache: Array, new: Array) -> Array:
        if reset is not None:
            restarts = jnp.any(reset & (step < end), axis=1)
            cache = jnp.where(restarts[:, None, None, None], 0, cache)
        return cache.at[rows, index].set(new.astype(cache.dtype), mode="drop")

    return LocalAttentionState(position, written(state.keys, k), written(state.values, v))
