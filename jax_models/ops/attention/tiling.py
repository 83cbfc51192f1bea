"""The division of attention's queries and keys into tiles."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jaxtyping import Array

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


def tiles(x: Array, tile: int, group: int = 1, fill: int = 0) -> Array:
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
