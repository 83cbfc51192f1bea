"""Causal attention, tile by tile."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import default_backend, lax
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int

from jax_models.ops.affine import carry_dtype
from jax_models.ops.attention import check_heads
from jax_models.ops.linear_map import linear_map
from jax_models.ops.varying import alike

Carry = TypeVar("Carry", bound=tuple)
TILE, LARGE_TILE = 128, 512
"""Steps. The scores of a small tile stay in a CPU's cache; accelerators prefer large products."""
FEW_TILES = 6
"""They need no loop."""
NEVER = np.iinfo(np.int32).max
"""The step of a key that fills up a tile."""


class Past(NamedTuple):
    """Keys and values of earlier steps, in any order."""

    keys: Float[Array, "batch slots kv_heads head_features"]
    values: Float[Array, "batch slots kv_heads head_features"]
    steps: Int[Array, "batch slots"]
    """The step of each, counted from the first query, hence negative."""
    exists: Bool[Array, ""]
    """Whether a query sees any of them."""


def causal_attention(
    q: Float[Array, "batch time heads head_features"],
    k: Float[Array, "batch time kv_heads head_features"],
    v: Float[Array, "batch time kv_heads head_features"],
    first: Int[Array, "batch time"],
    past: Past,
    *,
    window: int,
) -> Float[Array, "batch time heads head_features"]:
    """`attention` of each step t over the steps `first[t]` … t.

    The scores of one tile of queries and keys at a time are computed, with a running maximum and
    sum, and the derivative computes them again. So memory is linear in the number of steps.

    Args:
        q: queries.
        k: keys. Each head serves `heads / kv_heads` neighbouring heads of q.
        v: values.
        first: the first step that each step sees.
        past: the keys and values of the negative steps. They are skipped if no query sees any.
        window: no step sees more than the `window` − 1 steps before it.

    """
    check_heads(q, k)
    if not is_symbolic_dim(q.shape[1]) and q.shape[1] == 0:
        return q
    tile = TILE if default_backend() == "cpu" else LARGE_TILE
    tiling = _Tiling.of(q.shape[1], past.keys.shape[1], tile, window)
    return _compiled(tiling, (q, k, v, *past[:2]), (first, *past[2:]))


@partial(jax.jit, static_argnums=0)  # outside a jit, each call would compile anew
def _compiled(tiling: "_Tiling", floats, masks):
    return _attended(tiling, *alike((floats, masks)))[0]


class _Tiling(NamedTuple):
    """How the scores are cut into tiles."""

    tile: int
    """Queries, and keys of the same steps."""
    rows: int
    """Tiles of queries."""
    reach: int
    """Tiles of keys before its own that a tile of queries sees."""
    past_tile: int
    """Keys. Few queries get more keys at a time."""
    past_rows: int
    """Tiles of queries that see the past."""

    @classmethod
    def of(cls, time: Any, slots: int, largest: int, window: int) -> "_Tiling":
        """Equal tiles of multiples of 8 steps, or a single one."""

        def part(length: int, largest: int) -> int:
            count = _ceil_div(length, largest)
            return length if count <= 1 else 8 * _ceil_div(length, 8 * count)

        tile = largest if is_symbolic_dim(time) else part(time, largest)
        rows, reach = _ceil_div(time, tile), _ceil_div(window - 1, tile)
        past_tile = part(slots, largest * (largest // tile))
        if is_symbolic_dim(time):
            return cls(tile, rows, reach, past_tile, rows)
        return cls(tile, rows, min(reach, rows - 1), past_tile, min(rows, reach))

    def own_pairs(self) -> tuple[Any, Any]:
        """Each tile of queries with each tile of keys that it sees."""
        if is_symbolic_dim(self.rows):
            row, back = jnp.divmod(jnp.arange(self.rows * (self.reach + 1)), self.reach + 1)
            return row, row - back  # those before the first are masked
        row, back = np.divmod(np.arange(self.rows * (self.reach + 1)), self.reach + 1)
        return row[back <= row], (row - back)[back <= row]

    def past_pairs(self, columns: int) -> tuple[Any, Any]:
        """Each tile of queries that sees the past with each tile of the past."""
        return jnp.divmod(jnp.arange(self.past_rows * columns), columns)


class _Queries(NamedTuple):
    """Tiles (tiles, batch, kv_heads, group × steps, features), and which steps they see."""

    q: Array
    first: Array
    last: Array


class _Keys(NamedTuple):
    """Tiles (tiles, batch, kv_heads, steps, features), and their steps."""

    k: Array
    v: Array
    steps: Array


class _Softmax(NamedTuple):
    """The greatest score, and the sums of weights and of weighted values relative to it."""

    greatest: Array
    weights: Array
    values: Array

    def over_both(self, other: "_Softmax") -> "_Softmax":
        """Over the keys of both."""
        greatest = jnp.maximum(self.greatest, other.greatest)
        a, b = (jnp.exp(each.greatest - greatest) for each in (self, other))
        weights = a * self.weights + b * other.weights
        return _Softmax(greatest, weights, a * self.values + b * other.values)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attended(tiling: _Tiling, floats, masks) -> tuple[Array, Array]:
    """The outputs, and in tiles the logarithm of the sum of the exponentials of the scores."""
    q, k, v, past_k, past_v = floats
    queries = _queries(tiling, q, k, masks[0])

    def softmax(keys: _Keys, row, column) -> _Softmax:
        scores = _scores(queries, keys, row, column)
        greatest = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - greatest)
        values = _einsum("bhqk,bhkf->bhqf", weights.astype(v.dtype), _at(keys.v, column))
        return _Softmax(greatest, weights.sum(axis=-1, keepdims=True), values)

    def over_more(keys: _Keys, pairs, before: _Softmax) -> _Softmax:
        def add(carry: _Softmax, row, column):
            tile = _Softmax(*(_at(array, row) for array in carry))
            tile = tile.over_both(softmax(keys, row, column))
            return _Softmax(*map(partial(_put, row), carry, tile))

        return _loop(add, before, pairs)

    own = _keys(k, v, _steps(k, masks[0]), tiling.tile)
    if tiling.rows == 1:
        result = _Softmax(*(array[None] for array in softmax(own, 0, 0)))
    else:
        nothing = _zeros(queries.q)
        empty = _Softmax(_lowest(nothing[..., :1]), nothing[..., :1], nothing)
        result = over_more(own, tiling.own_pairs(), empty)
    if past_k.shape[1]:

        def with_past(result):
            past = _keys(past_k, past_v, masks[1], tiling.past_tile)
            return over_more(past, tiling.past_pairs(len(past.k)), result)

        result = lax.cond(masks[2], with_past, lambda result: result, result)
    y = _untiled(result.values / result.weights, q).astype(q.dtype)
    return y, result.greatest + jnp.log(result.weights)


class _Tangent(NamedTuple):
    """The derivative of `_attended`, forward."""

    tiling: _Tiling

    def __call__(self, residuals, floats):
        (primals, masks), _ = residuals

        def run(floats):
            return _attended.fun(self.tiling, floats, masks)

        return jax.jvp(run, (primals,), (floats,))[1]


class _Gradient(NamedTuple):
    """The derivative of `_attended`, backward."""

    tiling: _Tiling

    def __call__(self, residuals, cotangents):
        """By the weights, which the logarithms give without another maximum and sum."""
        ((q, k, v, past_k, past_v), masks), (y, log_sum) = residuals
        dy, d_log_sum = cotangents
        tile, group = self.tiling.tile, q.shape[2] // k.shape[2]
        faulty = jnp.isnan(log_sum)  # such a step has no gradient
        wide = carry_dtype(q.dtype)
        of_weights = (y.astype(wide) * dy.astype(wide)).sum(axis=-1, keepdims=True)
        of_weights = jnp.where(faulty, 0, _tiles(of_weights, tile, group) - d_log_sum)
        dy = jnp.where(faulty, 0, _tiles(dy, tile, group))
        queries = _queries(self.tiling, q, k, masks[0])
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

        own = _keys(k, v, _steps(k, masks[0]), tile)
        dq, dk, dv = gradients(own, self.tiling.own_pairs(), _zeros(queries.q))
        d_past = past_k, past_v
        if past_k.shape[1]:
            past_tile = self.tiling.past_tile

            def of_past(dq):
                past = _keys(past_k, past_v, masks[1], past_tile)
                dq, dk, dv = gradients(past, self.tiling.past_pairs(len(past.k)), dq)
                return dq, _untiled(scale * dk.mT, past_k), _untiled(dv.mT, past_v)

            def of_none(dq):
                return dq, *alike((_zeros(past_k), _zeros(past_v), dq))[:2]

            dq, *d_past = lax.cond(masks[2], of_past, of_none, dq)
        found = _untiled(scale * dq, q), _untiled(scale * dk.mT, k), _untiled(dv.mT, v), *d_past
        return tuple(gradient.astype(q.dtype) for gradient in found)


@_attended.defjvp
def _attended_jvp(tiling: _Tiling, primals, tangents):
    results = _attended(tiling, *primals)
    residuals = primals, results
    moved = linear_map(_Tangent(tiling), _Gradient(tiling), residuals, tangents[0])
    return results, moved


def _finite(x: Array) -> Array:
    """A weight of 0 times NaN would be NaN."""
    return jnp.where(jnp.isfinite(x), x, 0)


def _queries(tiling: _Tiling, q, k, first: Int[Array, "batch time"]) -> _Queries:
    tile, group = tiling.tile, q.shape[2] // k.shape[2]

    def of_each(steps: Int[Array, "batch time"]) -> Array:
        return _tiles(jnp.repeat(steps[..., None, None], group, axis=2), tile, group)

    return _Queries(_tiles(q, tile, group), of_each(first), of_each(_steps(q, first)))


def _steps(x: Array, like: Int[Array, "batch time"]) -> Int[Array, "1 time"]:
    return jnp.arange(x.shape[1], dtype=like.dtype)[None]


def _keys(k, v, steps: Int[Array, "batch steps"], tile: int) -> _Keys:
    """A key whose value is not finite is NaN, and the value 0: weights of 0 times NaN are NaN."""
    k = jnp.where(jnp.isfinite(k) & jnp.isfinite(v), k, jnp.nan)
    steps = _tiles(steps[..., None, None], tile, 1, NEVER).mT
    return _Keys(_tiles(k, tile), _tiles(_finite(v), tile), steps)


def _scores(queries: _Queries, keys: _Keys, row, column) -> Array:
    """Of the keys that a query does not see, the lowest number."""
    scores = _einsum("bhqf,bhkf->bhqk", _at(queries.q, row), _at(keys.k, column))
    steps = _at(keys.steps, column)
    seen = (steps >= _at(queries.first, row)) & (steps <= _at(queries.last, row))
    return jnp.where(seen, scores * queries.q.shape[-1] ** -0.5, _lowest(scores))


def _tiles(x: Array, tile: int, group: int = 1, fill: int = 0) -> Array:
    """(batch, steps, heads, features) as (tiles, batch, heads / group, group × tile, features)."""
    batch, steps, heads, features = x.shape
    count = _ceil_div(steps, tile)
    padding = [(0, 0), (0, count * tile - steps), (0, 0), (0, 0)]
    x = jnp.pad(x, padding, constant_values=fill)
    x = x.reshape(batch, count, tile, heads // group, group, features)
    return x.transpose(1, 0, 3, 4, 2, 5).reshape(count, batch, heads // group, -1, features)


def _untiled(x: Array, like: Array) -> Array:
    """The way back, to the shape of the other array."""
    batch, steps, heads, features = like.shape
    count, _, kv_heads, *_ = x.shape
    x = x.reshape(count, batch, kv_heads, heads // kv_heads, -1, features)
    return x.transpose(1, 0, 4, 2, 3, 5).reshape(batch, -1, heads, features)[:, :steps]


def _loop(step: Callable[..., Carry], carry: Carry, pairs: tuple[Any, Any]) -> Carry:
    count = pairs[0].shape[0]
    unroll = not is_symbolic_dim(count) and count <= FEW_TILES
    return lax.scan(lambda carry, pair: (step(carry, *pair), None), carry, pairs, unroll=unroll)[0]


def _ceil_div(a: Any, b: int) -> Any:
    return (a + b - 1) // b


def _einsum(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=carry_dtype(a.dtype))


def _zeros(like: Array) -> Array:
    zeros = jnp.zeros(like.shape, carry_dtype(like.dtype))
    return alike((zeros, like))[0]


def _lowest(like: Array) -> Array:
    return jnp.full_like(like, jnp.finfo(like.dtype).min)


def _at(x: Array, i) -> Array:
    return lax.dynamic_index_in_dim(x, i, keepdims=False)


def _put(i, x: Array, tile: Array) -> Array:
    return lax.dynamic_update_index_in_dim(x, tile, i, axis=0)
