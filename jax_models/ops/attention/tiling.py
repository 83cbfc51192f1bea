"""The division of attention's queries and keys into tiles."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.export import is_symbolic_dim
from jaxtyping import Array

from jax_models.ops.shard_map_axes import match_varying_axes

AFTER_ALL_QUERIES = np.iinfo(np.int32).max
"""The step number of keys that no query may see, such as padding."""


class Tiling(NamedTuple):
    """The division of the scores into tiles."""

    tile: int
    """Number of steps of a tile of queries, and of a tile of the keys of the same sequence."""
    rows: int
    """Number of tiles of queries."""
    reach: int
    """Number of tiles of keys that a tile of queries sees before its own."""
    past_tile: int
    """Number of steps of a tile of past keys. It is larger if there are few queries."""
    past_rows: int
    """Number of tiles of queries that see the past."""

    @classmethod
    def of(cls, time: Any, slots: int, largest: int, window: int) -> "Tiling":
        """Chooses equal tiles, each a multiple of 8 steps, or a single tile."""

        def tile_size(length: int, largest: int) -> int:
            count = ceil_div(length, largest)
            return length if count <= 1 else 8 * ceil_div(length, 8 * count)

        tile = largest if is_symbolic_dim(time) else tile_size(time, largest)
        rows, reach = ceil_div(time, tile), ceil_div(window - 1, tile)
        past_tile = tile_size(slots, largest * min(largest // tile, 4))
        if is_symbolic_dim(time):
            return cls(tile, rows, reach, past_tile, rows)
        return cls(tile, rows, min(reach, rows - 1), past_tile, min(rows, reach))

    def own_pairs(self) -> tuple[Any, Any]:
        """Pairs each tile of queries with each tile of keys that it sees."""
        if is_symbolic_dim(self.rows):
            row, back = jnp.divmod(jnp.arange(self.rows * (self.reach + 1)), self.reach + 1)
            return row, row - back  # tiles before the first are masked
        row, back = np.divmod(np.arange(self.rows * (self.reach + 1)), self.reach + 1)
        return row[back <= row], (row - back)[back <= row]

    def past_pairs(self) -> tuple[Any, Any]:
        """Pairs each tile of queries that sees the past with a single tile of past keys."""
        rows = jnp.arange(self.past_rows)
        return rows, jnp.zeros_like(rows)


class Parts(NamedTuple):
    """The numbers of parts into which the batch and the heads are divided."""

    rows: int
    heads: int

    @classmethod
    def of(cls, q: Array, k: Array, tiling: Tiling, most: int) -> "Parts":
        """Chooses the fewest parts with at most `most` scores in their tiles, or one head each."""
        batch, _, heads, features = q.shape
        if is_symbolic_dim(batch) or not batch:
            return WHOLE

        def fewest(count: int, size: int) -> int:
            fits = (n for n in range(1, count) if count % n == 0 and count // n * size <= most)
            return next(fits, count)

        size = tiling.tile * max(tiling.tile, features)
        of_heads = fewest(k.shape[2], heads // k.shape[2] * size)
        return cls(fewest(batch, heads // of_heads * size), of_heads)

    def run(self, function: Callable[..., Any], results: Any, *arrays: Any) -> Any:
        """Runs a function of `arrays` part by part, and writes its results over `results`.

        The first axis of each array is the batch, and the third axis the heads.
        """
        if self == WHOLE:
            return function(*arrays)

        def place(x: Array, part: Array) -> tuple[list[Any], list[int]]:
            """Returns the start and the shape of a part of x."""
            counts = self.rows, 1, self.heads, 1
            numbers = part // self.heads, 0, part % self.heads, 0
            shape = [size // count for size, count in zip(x.shape, counts, strict=False)]
            return [i * size for i, size in zip(numbers, shape, strict=False)], shape

        def run_part(part: Array, results: Any) -> Any:
            def write(x: Array, found: Array) -> Array:
                return lax.dynamic_update_slice(x, found, place(x, part)[0])

            of_part = jax.tree.map(lambda x: lax.dynamic_slice(x, *place(x, part)), arrays)
            return jax.tree.map(write, results, function(*of_part))

        results, arrays = match_varying_axes((results, arrays))
        return lax.fori_loop(0, self.rows * self.heads, run_part, results)


WHOLE = Parts(1, 1)


def tiles(x: Array, tile: int, group: int = 1, fill: float = 0) -> Array:
    """Maps (batch, steps, heads, features) to (tiles, batch, heads/group, group·tile, features)."""
    batch, steps, heads, features = x.shape
    count = ceil_div(steps, tile)
    padding = [(0, 0), (0, count * tile - steps), (0, 0), (0, 0)]
    x = jnp.pad(x, padding, constant_values=fill)
    x = x.reshape(batch, count, tile, heads // group, group, features)
    x = x.transpose(1, 0, 3, 4, 2, 5)
    return x.reshape(count, batch, heads // group, group * tile, features)


def untiled(x: Array, like: Array) -> Array:
    """The inverse of `tiles`: returns an array with the batch, steps and heads of `like`."""
    batch, steps, heads, _ = like.shape
    count, _, kv_heads, rows, features = x.shape
    group = heads // kv_heads
    x = x.reshape(count, batch, kv_heads, group, rows // group, features)
    x = x.transpose(1, 0, 4, 2, 3, 5)
    return x.reshape(batch, count * (rows // group), heads, features)[:, :steps]


def ceil_div(a: Any, b: int) -> Any:
    return (a + b - 1) // b
