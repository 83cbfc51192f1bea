"""Causal attention, tile by tile."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim
from jaxtyping import Array, Float, Int

from jax_models.ops.affine import carry_dtype
from jax_models.ops.attention.definition import CausalAttention, past_steps
from jax_models.ops.attention.tiling import AFTER_ALL_QUERIES, WHOLE, Parts, Tiling, tiles, untiled
from jax_models.ops.forms import runs_on_one_device
from jax_models.ops.linear_map import linear_map
from jax_models.ops.shard_map_axes import match_varying_axes

Carry = TypeVar("Carry", bound=tuple)
TILE, SMALL_TILE = 512, 128
"""The largest number of steps of a tile, and of one whose queries see few keys, on a CPU."""
MAX_SCORES = 3 * TILE**2
"""The largest number of scores that are computed at once on a CPU.

If the tiles of all heads and rows of the batch have more, a few heads and rows are computed at a
time, because writing all of q, k, v and the scores to fresh memory takes longer than the products
of short sequences.
"""


@jax.jit  # else eager calls would compile the loop each time
def run_small(call: CausalAttention) -> Array:
    """Computes the attention in tiles for a CPU."""
    return _run(call, *_small(call))


@jax.jit
def run_large(call: CausalAttention) -> Array:
    """Computes the attention in tiles for an accelerator."""
    return _run(call, *_large(call))


def _run(call: CausalAttention, tiling: Tiling, parts: Parts) -> Array:
    """Computes the softmax with a running maximum and sum.

    Only the scores of one tile of queries and one tile of keys exist at a time, and the backward
    pass recomputes them. Memory is therefore linear in the number of steps. A step reads the past
    in tiles of up to four times the size, and skips the tiles in which no slot is filled.

    The parts of the batch and of the heads are computed one after another.
    """
    floats = call.q, call.k, call.v, call.past.keys, call.past.values
    return _attended(tiling, parts, floats, (call.first, call.past.position))[0]


def _small(call: CausalAttention) -> tuple[Tiling, Parts]:
    time, window = call.q.shape[1], call.window
    if is_symbolic_dim(time):
        tile = SMALL_TILE
    else:
        # XLA divides only large tiles among threads. But with a window, or past the end of a short
        # sequence, large tiles have many scores that no query sees.
        tile = max(SMALL_TILE, min(TILE, time if window >= time else window // 4))
    tiling = _tiling(call, tile)
    # A loop over slices would copy a cache, and gather a batch that is divided over devices.
    in_parts = not call.past.keys.shape[1] and runs_on_one_device("cpu")
    return tiling, Parts.of(call.q, call.k, tiling, MAX_SCORES) if in_parts else WHOLE


def _large(call: CausalAttention) -> tuple[Tiling, Parts]:
    return _tiling(call, TILE), WHOLE


def _tiling(call: CausalAttention, largest: int) -> Tiling:
    return Tiling.of(call.q.shape[1], call.past.keys.shape[1], largest, call.window)


def small_tiles_pay(call: CausalAttention, platform: str, differentiated: bool) -> bool:
    """Whether the two forms differ. They do not if there are few steps, heads and rows."""
    return _small(call) != _large(call)


class _Queries(NamedTuple):
    """Queries in tiles (tiles, batch, kv_heads, group × steps, features).

    `first` and `last` are the first and the last step that each query sees.
    """

    q: Array
    first: Array
    last: Array


class _Keys(NamedTuple):
    """Keys and values in tiles (tiles, batch, kv_heads, steps, features), and their steps."""

    k: Array
    v: Array
    steps: Array


class _Softmax(NamedTuple):
    """A softmax over some of the keys: the greatest score, and sums of weights and weighted values.

    A weight is exp(score − greatest).
    """

    greatest: Array
    weights: Array
    values: Array

    def merged(self, other: "_Softmax") -> "_Softmax":
        """Returns the softmax over the keys of both."""
        greatest = jnp.maximum(self.greatest, other.greatest)
        a, b = (jnp.exp(each.greatest - greatest) for each in (self, other))
        weights = a * self.weights + b * other.weights
        return _Softmax(greatest, weights, a * self.values + b * other.values)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _attended(tiling: Tiling, parts: Parts, floats, masks) -> tuple[Array, Array]:
    """Returns the outputs, and the log-sum-exp of each query's scores, with one feature."""
    q, _, v, *_ = floats
    y = jnp.zeros_like(q, shape=(*q.shape[:3], v.shape[3]))
    log_sum = jnp.zeros_like(q, carry_dtype(q.dtype), shape=(*q.shape[:3], 1))
    return parts.run(partial(_attended_part, tiling), (y, log_sum), floats, masks)


def _attended_part(tiling: Tiling, floats, masks) -> tuple[Array, Array]:
    """Adds up the softmax of each query over the tiles of keys that it sees."""
    q, k, v, past_k, past_v = floats
    queries = _queries(tiling, q, k, masks[0])

    def softmax(keys: _Keys, row, column) -> _Softmax:
        scores = _scores(queries, keys, row, column)
        # The maximum is kept finite, so that a score of −∞ has weight 0 even if all scores are −∞.
        greatest = jnp.maximum(scores.max(axis=-1, keepdims=True), jnp.finfo(scores.dtype).min)
        weights = jnp.exp(scores - greatest)
        values = _einsum("bhqk,bhkf->bhqf", weights.astype(v.dtype), _at(keys.v, column))
        return _Softmax(greatest, weights.sum(axis=-1, keepdims=True), values)

    def add_keys(keys: _Keys, pairs, before: _Softmax) -> _Softmax:
        def add(carry: _Softmax, row, column):
            tile = _Softmax(*(_at(array, row) for array in carry))
            tile = tile.merged(softmax(keys, row, column))
            return _Softmax(*map(partial(_put, row), carry, tile))

        return _loop(add, before, pairs)

    nothing = _zeros(queries.q[..., :1])
    lowest = jnp.full_like(nothing, jnp.finfo(nothing.dtype).min)
    result = _Softmax(lowest, nothing, jnp.repeat(nothing, v.shape[3], axis=-1))
    if k.shape[1]:
        own = _keys(k, v, _steps(k, masks[0]), tiling.tile)
        if tiling.rows == 1:
            result = _Softmax(*(array[None] for array in softmax(own, 0, 0)))
        else:
            result = add_keys(own, tiling.own_pairs(), result)

    def add_past(result: _Softmax, keys: _Keys, start) -> _Softmax:
        return add_keys(keys, tiling.past_pairs(), result)

    result = _over_past(tiling, q.dtype, add_past, result, past_k, past_v, masks[1])
    y = untiled(result.values / result.weights, q).astype(q.dtype)
    return y, untiled(result.greatest + jnp.log(result.weights), q)


def _tangent(tiling: Tiling, parts: Parts, residuals, floats):
    """The forward-mode derivative of `_attended`."""
    (primals, masks), _ = residuals

    def run(floats):
        return _attended.fun(tiling, parts, floats, masks)

    return jax.jvp(run, (primals,), (floats,))[1]


def _gradient(tiling: Tiling, parts: Parts, residuals, cotangents):
    """The backward pass of `_attended`."""
    gradients = jax.tree.map(jnp.zeros_like, residuals[0][0])
    return parts.run(partial(_gradient_part, tiling), gradients, residuals, cotangents)


def _gradient_part(tiling: Tiling, residuals, cotangents):
    """Recomputes the weights from the log-sum-exps, without another maximum and sum."""
    ((q, k, v, past_k, past_v), masks), (y, log_sum) = residuals
    dy, d_log_sum = cotangents
    tile, group = tiling.tile, q.shape[2] // k.shape[2]
    log_sum = tiles(log_sum, tile, group, jnp.inf)
    # Steps whose output is NaN contribute no gradient, and neither does padding.
    faulty = ~jnp.isfinite(log_sum)
    # Compute the part of the scores' gradient that is the same for all keys of a query.
    wide = carry_dtype(q.dtype)
    of_weights = (y.astype(wide) * dy.astype(wide)).sum(axis=-1, keepdims=True)
    of_weights = jnp.where(faulty, 0, tiles(of_weights - d_log_sum, tile, group))
    dy = jnp.where(faulty, 0, tiles(dy, tile, group))
    # Transpose once, outside of the loop over tiles.
    queries = _queries(tiling, q, k, masks[0])
    dy_by_feature, q_by_feature = dy.mT, _finite(queries.q).mT
    scale = q.shape[-1] ** -0.5

    def gradients(keys: _Keys, pairs, dq):
        def add(carry, row, column):
            dq, dk, dv = carry
            k, v = _finite(_at(keys.k, column)), _at(keys.v, column)
            weights = jnp.exp(_scores(queries, keys, row, column) - _at(log_sum, row))
            weights = jnp.where(_at(faulty, row), 0, weights)
            d_weights = _einsum("bhqf,bhkf->bhqk", _at(dy, row), v)
            d_scores = (weights * (d_weights - _at(of_weights, row))).astype(k.dtype)
            of_v = _einsum("bhfq,bhqk->bhfk", _at(dy_by_feature, row), weights.astype(v.dtype))
            of_k = _einsum("bhfq,bhqk->bhfk", _at(q_by_feature, row), d_scores)
            of_q = _einsum("bhqk,bhkf->bhqf", d_scores, k)
            return (
                _put(row, dq, _at(dq, row) + of_q),
                _put(column, dk, _at(dk, column) + of_k),
                _put(column, dv, _at(dv, column) + of_v),
            )

        return _loop(add, (dq, _zeros(keys.k.mT), _zeros(keys.v.mT)), pairs)

    # Add up the gradients of the sequence's keys, then of the past keys, which are skipped if
    # unseen.
    dq, *d_own = _zeros(queries.q), jnp.zeros_like(k), jnp.zeros_like(v)
    if k.shape[1]:
        own = _keys(k, v, _steps(k, masks[0]), tile)
        dq, dk, dv = gradients(own, tiling.own_pairs(), dq)
        d_own = untiled(scale * dk.mT, k), untiled(dv.mT, v)

    def add_past(carry, keys: _Keys, start):
        dq, *d_past = carry
        dq, dk, dv = gradients(keys, tiling.past_pairs(), dq)
        of_tile = (scale * dk.mT, dv.mT)
        return dq, *(
            lax.dynamic_update_slice_in_dim(
                whole, before + untiled(found, before).astype(before.dtype), start, axis=1
            )
            for whole, found in zip(d_past, of_tile, strict=True)
            for before in [lax.dynamic_slice_in_dim(whole, start, tiling.past_tile, axis=1)]
        )

    d_past = (_zeros(past_k), _zeros(past_v))
    dq, *d_past = _over_past(tiling, q.dtype, add_past, (dq, *d_past), past_k, past_v, masks[1])
    found = untiled(scale * dq, q), *d_own, *d_past
    floats = residuals[0][0]
    return tuple(g.astype(x.dtype) for g, x in zip(found, floats, strict=True))


@_attended.defjvp
def _attended_jvp(tiling: Tiling, parts: Parts, primals, tangents):
    results = _attended(tiling, parts, *primals)
    residuals = primals, results
    return results, linear_map(_tangent, _gradient, residuals, tangents[0], tiling, parts)


def _finite(x: Array) -> Array:
    """Replaces NaN and infinite numbers by 0, because even a weight of 0 times NaN would be NaN."""
    return jnp.where(jnp.isfinite(x), x, 0)


def _queries(tiling: Tiling, q, k, first: Int[Array, "batch time"]) -> _Queries:
    tile, group = tiling.tile, q.shape[2] // k.shape[2]

    def tiles_of_steps(steps: Int[Array, "batch time"]) -> Array:
        return tiles(jnp.repeat(steps[..., None, None], group, axis=2), tile, group)

    return _Queries(tiles(q, tile, group), tiles_of_steps(first), tiles_of_steps(_steps(q, first)))


def _steps(x: Array, like: Int[Array, "batch time"]) -> Int[Array, "1 time"]:
    return jnp.arange(x.shape[1], dtype=like.dtype)[None]


def _keys(k, v, steps: Int[Array, "batch steps"], tile: int) -> _Keys:
    """Divides keys and values into tiles.

    If a key or its value is not finite, the key becomes NaN, and so does the output of each query
    that sees it. The value becomes 0, because a weight of 0 times NaN would make other queries NaN,
    too.
    """
    finite = jnp.isfinite(k) & jnp.isfinite(v).all(axis=-1, keepdims=True)
    k = jnp.where(finite, k, jnp.nan)
    steps = tiles(steps[..., None, None], tile, 1, AFTER_ALL_QUERIES).mT
    return _Keys(tiles(k, tile), tiles(_finite(v), tile), steps)


def _over_past(
    tiling: Tiling,
    dtype: jnp.dtype,
    step: Callable[[Carry, _Keys, Any], Carry],
    carry: Carry,
    k: Float[Array, "batch slots kv_heads head_features"],
    v: Float[Array, "batch slots kv_heads value_features"],
    position: Int[Array, " batch"],
) -> Carry:
    """Runs `step(carry, keys, start)` over tiles of the filled slots, which begin at slot `start`.

    The tiles are slices of the cache, because dividing all of it would cost as much as reading it.
    """
    slots, tile = k.shape[1], tiling.past_tile
    if not slots:
        return carry

    def add_tile(first, carry: Carry) -> Carry:
        start = jnp.minimum(first, slots - tile)
        k_tile, v_tile = (
            lax.dynamic_slice_in_dim(array, start, tile, axis=1).astype(dtype) for array in (k, v)
        )
        # The last tile overlaps with the one before it, and leaves out what that one has read.
        slot = start + jnp.arange(tile, dtype=position.dtype)
        steps = past_steps(slot, position, slots)
        steps = jnp.where((slot < first)[None], AFTER_ALL_QUERIES, steps)
        return step(carry, _keys(k_tile, v_tile, steps, tile), start)

    def next_tile(carry: Carry, first):
        return lax.cond(first < filled, add_tile, lambda _, carry: carry, first, carry), None

    filled = jnp.max(position, initial=0)
    firsts = jnp.arange(0, slots, tile, dtype=position.dtype)
    return lax.scan(next_tile, carry, firsts)[0]


def _scores(queries: _Queries, keys: _Keys, row, column) -> Array:
    """Returns the scores of a pair of tiles. Keys that a query does not see have the score −∞."""
    scores = _einsum("bhqf,bhkf->bhqk", _at(queries.q, row), _at(keys.k, column))
    steps = _at(keys.steps, column)
    seen = (steps >= _at(queries.first, row)) & (steps <= _at(queries.last, row))
    seen &= column >= 0  # a negative column, which `own_pairs` may have, would index another tile
    return jnp.where(seen, scores * queries.q.shape[-1] ** -0.5, -jnp.inf)


def _loop(step: Callable[..., Carry], carry: Carry, pairs: tuple[Any, Any]) -> Carry:
    return lax.scan(lambda carry, pair: (step(carry, *pair), None), carry, pairs)[0]


def _einsum(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=carry_dtype(a.dtype))


def _zeros(like: Array) -> Array:
    zeros = jnp.zeros(like.shape, carry_dtype(like.dtype))
    return match_varying_axes((zeros, like))[0]


def _at(x: Array, i) -> Array:
    return lax.dynamic_index_in_dim(x, i, keepdims=False)


def _put(i, x: Array, tile: Array) -> Array:
    return lax.dynamic_update_index_in_dim(x, tile, i, axis=0)
