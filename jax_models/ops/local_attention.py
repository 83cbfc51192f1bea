"""Causal attention over a window, in chunks."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int

from jax_models.ops.attention import attention
from jax_models.ops.checks import checked
from jax_models.ops.segments import active_steps, at_end, positions_after
from jax_models.ops.time_axis import refuse_lengths, states_between
from jax_models.ops.varying import alike

CHUNK = 256
"""Queries that are computed together."""


class LocalAttentionState(NamedTuple):
    """What local attention carries: the keys and values of the last window − 1 steps.

    Those of position p of the document are in slot p mod (window − 1).
    """

    position: Int[Array, " batch"]
    """Steps of the document so far."""
    keys: Float[Array, "batch slots kv_heads head_features"]
    values: Float[Array, "batch slots kv_heads head_features"]


class Keys(NamedTuple):
    """Keys and values in some order, their positions, and the documents that they are of."""

    keys: Float[Array, "batch keys kv_heads head_features"]
    values: Float[Array, "batch keys kv_heads head_features"]
    positions: Int[Array, "batch keys"]
    documents: Int[Array, "batch keys"]

    def and_then(self, others: "Keys") -> "Keys":
        """These, and others after them."""
        pairs = zip(self, others, strict=True)
        return Keys(*(jnp.concatenate(pair, axis=1) for pair in pairs))


@checked()
def local_attention(
    q: Float[Array, "batch time heads head_features"],
    k: Float[Array, "batch time kv_heads head_features"],
    v: Float[Array, "batch time kv_heads head_features"],
    state: LocalAttentionState,
    *,
    lengths: Int[Array, " batch"] | None = None,
    reset: Bool[Array, "batch time"] | None = None,
    time_axis: str | None = None,
) -> tuple[Float[Array, "batch time heads head_features"], LocalAttentionState]:
    """`attention` of each step over itself and the window − 1 steps before it in its document.

    The window is one more than the state has slots. Over T steps it costs O(T · window) operations.
    No scores are kept for the backward pass, which computes them again, chunk by chunk: the memory
    is that of q, k and v, and that of one chunk's scores.

    With a `time_axis`, over whose devices time is divided, inside a `jax.shard_map`, a device gets
    the keys and values of all and keeps those of its window. `lengths` must then be None.
    """
    refuse_lengths(lengths, time_axis)

    def after(piece: tuple[Array, Array, Array | None], state: LocalAttentionState):
        k, v, reset = piece
        return _written(state, _steps(state, k, v, reset), lengths, reset)

    if time_axis is None:
        last = after((k, v, reset), state)
    else:
        state, last = states_between(after, (k, v, reset), state, time_axis)
    time, steps = q.shape[1], _steps(state, k, v, reset)
    past = _past(state, k.dtype)
    if not is_symbolic_dim(time) and time <= CHUNK:
        y = _attended(q, steps.positions, steps.documents, past.and_then(steps))
    else:
        y = _in_chunks(q, steps, past)
    return y, last


def _steps(state: LocalAttentionState, k: Array, v: Array, reset: Array | None) -> Keys:
    """The keys and values of the steps after a state; the first document is number 0."""
    positions = positions_after(state.position, k.shape[1], reset)
    documents = jnp.zeros_like(positions) if reset is None else jnp.cumsum(reset, axis=1)
    return Keys(k, v, positions, documents.astype(positions.dtype))


def _past(state: LocalAttentionState, dtype) -> Keys:
    """The state's keys in the order of its slots; empty slots are of no document."""
    count = state.keys.shape[1]
    slots = jnp.arange(count, dtype=state.position.dtype)[None]
    last = state.position[:, None] - 1
    positions = last - (last - slots) % max(count, 1)
    documents = jnp.where(positions < 0, -1, 0)
    return Keys(state.keys.astype(dtype), state.values.astype(dtype), positions, documents)


def _attended(
    q: Float[Array, "batch time heads head_features"],
    positions: Int[Array, "batch time"],
    documents: Int[Array, "batch time"],
    keys: Keys,
) -> Float[Array, "batch time heads head_features"]:
    """Attention of queries over the keys of their document that are in their window."""
    window = keys.keys.shape[1] - q.shape[1] + 1
    distance = positions[:, :, None] - keys.positions[:, None]
    mask = (distance >= 0) & (distance < window)
    mask = mask & (documents[:, :, None] == keys.documents[:, None])
    return attention(q, keys.keys, keys.values, mask)


def _in_chunks(
    q: Float[Array, "batch time heads head_features"], steps: Keys, past: Keys
) -> Float[Array, "batch time heads head_features"]:
    """Chunk by chunk; each hands its last window − 1 keys to the next."""
    batch_size, time = q.shape[:2]
    count = (time + CHUNK - 1) // CHUNK

    def chunks(array: Array) -> Array:
        padding = [(0, 0), (0, count * CHUNK - time), *((0, 0),) * (array.ndim - 2)]
        padded = jnp.pad(array, padding, constant_values=-2)  # a document that there is not
        return jnp.moveaxis(padded.reshape(batch_size, count, CHUNK, *array.shape[2:]), 1, 0)

    @jax.checkpoint
    def chunk(before: Keys, inputs: tuple[Array, Keys]) -> tuple[Keys, Array]:
        q, own = inputs
        keys = before.and_then(own)
        y = _attended(q, own.positions, own.documents, keys)
        return Keys(*(array[:, CHUNK:] for array in keys)), y

    order = jnp.argsort(past.positions, axis=1)
    past = Keys(*(jax.vmap(lambda row, i: row[i])(array, order) for array in past))
    past, xs = alike((past, (chunks(q), jax.tree.map(chunks, steps))))
    _, y = jax.lax.scan(chunk, past, xs)
    return jnp.moveaxis(y, 0, 1).reshape(batch_size, count * CHUNK, *q.shape[2:])[:, :time]


def _written(
    state: LocalAttentionState,
    steps: Keys,
    lengths: Int[Array, " batch"] | None,
    reset: Bool[Array, "batch time"] | None,
) -> LocalAttentionState:
    """The state with the last keys and values of each row's last document in their slots."""
    batch_size, time = steps.positions.shape
    position = at_end(state.position, steps.positions + 1, lengths)
    slots = state.keys.shape[1]
    if not slots:
        return state._replace(position=position)
    kept = steps.positions >= position[:, None] - slots
    active = active_steps(time, lengths)
    if active is not None:
        kept = kept & active
    cache = {"keys": state.keys, "values": state.values}
    if reset is not None:
        last = at_end(jnp.zeros_like(position), steps.documents, lengths)
        kept = kept & (steps.documents == last[:, None])
        carried = (last == 0)[:, None, None, None]
        cache = {name: jnp.where(carried, array, 0) for name, array in cache.items()}
    rows = jnp.arange(batch_size, dtype=position.dtype)[:, None]
    index = jnp.where(kept, steps.positions % slots, slots)
    for name, array in cache.items():
        new = getattr(steps, name).astype(array.dtype)
        cache[name] = array.at[rows, index].set(new, mode="drop")
    return LocalAttentionState(position, **cache)
