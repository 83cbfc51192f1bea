"""Causal attention over a window."""

from collections.abc import Callable
from typing import Any, TypeVar, Unpack

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jax_models.checks.arguments import checked
from jax_models.ops.attention import AttentionMethod, causal_attention
from jax_models.ops.attention.definition import CausalAttention, LocalAttentionState
from jax_models.ops.rows import DividedMasks, Rows, at_end, given_rows, positions_after
from jax_models.ops.shard_map_axes import match_varying_axes
from jax_models.ops.time_axis import states_between

State = TypeVar("State", bound=Any)
"""A NamedTuple of the position and the arrays of the last steps."""


@checked()
def local_attention(
    q: Float[Array, "batch time heads head_features"],
    k: Float[Array, "batch time kv_heads head_features"],
    v: Float[Array, "batch time kv_heads value_features"],
    state: LocalAttentionState,
    *,
    empty: bool = False,
    holds_whole_document: bool = False,
    dropout: Callable[[Array], Array] | None = None,
    method: AttentionMethod = "auto",
    **masks: Unpack[DividedMasks],
) -> tuple[Float[Array, "batch time heads value_features"], LocalAttentionState]:
    """Computes the `attention` of each step over itself and the window − 1 steps before it.

    Steps do not see other documents. The window is the number of slots of the state plus one, and T
    steps cost O(T · window) operations. The backward pass recomputes the scores, tile by tile, so
    only q, k, v and the scores of one tile need memory. If a query or anything that it sees is not
    finite, its output in that head is NaN; the outputs of other steps are unaffected.

    Pass `empty=True` if the state holds no keys yet, so that the cache is not read, and
    `holds_whole_document=True` if no document has more steps than the state has slots, which makes
    a single step faster. `dropout` is applied to the weights of the softmax, which then exist as a
    whole. `method` names the form that runs, as in `attention`.

    With a `time_axis`, each device gathers the keys and values of all devices and keeps those of
    its window. `lengths` must then be None.
    """
    past = {"empty": empty, "holds_whole_document": holds_whole_document}
    rows = given_rows(masks)
    return cached_attention(q, (k, v), state, lambda k, v: (k, v), dropout, method, rows, **past)


def cached_attention(
    q: Float[Array, "batch time heads head_features"],
    new: tuple[Float[Array, "batch time _ _"], ...],
    state: State,
    keys_and_values: Callable[..., tuple[Array, Array]],
    dropout: Callable[[Array], Array] | None,
    method: str,
    rows: Rows,
    *,
    empty: bool,
    holds_whole_document: bool,
) -> tuple[Float[Array, "batch time heads value_features"], State]:
    """Like `local_attention`, with a state of any arrays.

    The state holds the position and the last steps of some arrays. `new` has the same arrays at the
    steps of this call. `keys_and_values` computes keys and values from them.
    """

    def after(piece: tuple[tuple[Array, ...], Array | None], state: State) -> State:
        return _written(state, *piece, rows.lengths)

    # Over devices, the arrays from before this device's steps come from the other devices.
    if rows.time_axis is None:
        last = after((new, rows.reset), state)
    else:
        state, last = states_between(after, (new, rows.reset), state, rows.time_axis)
        empty = False
    # Steps are numbered relative to the first query, so those of the past are negative.
    slots = state[1].shape[1]
    positions = positions_after(state[0], q.shape[1], rows.reset)
    steps = jnp.arange(q.shape[1], dtype=positions.dtype)[None]
    first = steps - jnp.minimum(positions, slots)
    reads_past = bool(slots) and not empty
    is_step = q.shape[1] == 1 and rows.lengths is None and rows.time_axis is None
    if reads_past and holds_whole_document and dropout is None and is_step:
        # A single step reads the updated cache. If it read the old one, XLA would have to copy it.
        past = LocalAttentionState(last[0], *keys_and_values(*last[1:]))
        k, v = (a[:, :0].astype(q.dtype) for a in past[1:])
        first = first - 1
    else:
        k, v = keys_and_values(*new)
        kept = keys_and_values(*state[1:]) if reads_past else (k[:, :0], v[:, :0])
        past = LocalAttentionState(state[0], *kept)
    call = CausalAttention(q, k, v, first, past, window=slots + 1)
    return causal_attention(call, method, dropout), last


def _written(
    state: State,
    new: tuple[Float[Array, "batch time _ _"], ...],
    reset: Bool[Array, "batch time"] | None,
    lengths: Int[Array, " batch"] | None,
) -> State:
    """Returns the state after the steps: the last arrays of each row's last document."""
    batch_size, time, *_ = new[0].shape
    positions = positions_after(state[0], time, reset)
    position = at_end(state[0], positions + 1, lengths)
    slots = state[1].shape[1]
    if not slots or time == 0:
        return type(state)(position, *state[1:])
    # Find the step of the key that each slot holds at the end, negative if it is in the cache.
    end = time if lengths is None else lengths[:, None].astype(position.dtype)
    slot = jnp.arange(slots, dtype=position.dtype)[None]
    step = end - 1 - (position[:, None] - 1 - slot) % slots
    is_new = (step >= 0) & (step >= end - position[:, None])

    def written(cache: Array, new: Array) -> Array:
        new = new.astype(cache.dtype)
        if reset is not None:  # most steps reset no row, and need not touch the whole cache
            cache, begins = match_varying_axes((cache, jnp.any(reset, axis=1)))
            cache = lax.cond(
                jnp.any(begins),
                lambda cache: jnp.where(begins[:, None, None, None], 0, cache),
                lambda cache: cache,
                cache,
            )
        if time == 1:  # write in place
            index = jnp.where(end > 0, positions % slots, slots)
            row = jnp.arange(batch_size, dtype=position.dtype)[:, None]
            return cache.at[row, index].set(new, mode="drop")
        new = jnp.take_along_axis(new, step[..., None, None], axis=1, mode="clip")
        return jnp.where(is_new[..., None, None], new, cache)

    return type(state)(position, *map(written, state[1:], new))
