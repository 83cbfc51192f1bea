"""Grouped products, block by block. All rows of a block belong to one group."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim
from jaxtyping import Array, Float, Int

from jax_models.ops.affine import carry_dtype
from jax_models.ops.forms import refusal_of_symbolic
from jax_models.ops.grouped.definition import Groups, OuterProducts, Products
from jax_models.ops.shard_map_axes import match_varying_axes

SMALLEST, LARGEST = 32, 128
"""The range of the number of rows of a block.

A block should have about half as many rows as a group: the last block of each group computes rows
that are thrown away, and the smaller the blocks, the more often the matrix of the group is read.
"""

BLOCK_COST = 20_000
"""How many matrix entries the definition copies in the time of one small block."""


class Block(NamedTuple):
    """Some rows of one group."""

    group: Int[Array, ""]
    start: Int[Array, ""]
    """The first row that is read."""
    is_member: Array
    """Which of the rows that are read belong to the block."""


def refusal(call: Products | OuterProducts) -> str | None:
    """Returns why there are no blocks for the call, or None if there are."""
    return refusal_of_symbolic(call.x.shape[0])


def pays(call: Products | OuterProducts, platform: str, differentiated: bool) -> bool:
    """Few rows with small matrices take less time by the definition, as measured on a CPU."""
    rows, features = call.x.shape
    copied = rows * features * call[1].shape[-1]
    groups = len(call.groups.ends)
    blocks = groups + rows // max(block_size(rows, groups), 1)
    return is_symbolic_dim(copied) or copied >= BLOCK_COST * blocks


def block_size(rows: int, groups: int) -> int:
    """Returns the number of rows of a block."""
    half_a_group = max(rows // max(2 * groups, 1), 1)
    power_of_2 = 2 ** (half_a_group.bit_length() - 1)
    return min(max(SMALLEST, min(power_of_2, LARGEST)), rows)


def over_blocks(rows: int, groups: Groups, step: Callable[[Block, Any], Any], initial: Any) -> Any:
    """Runs `step(block, carry)` for each block.

    The loop has as many iterations as there are blocks, which depends on the sizes of the groups.
    """
    size = block_size(rows, len(groups.ends))
    counts = -((groups.starts - groups.ends) // size)
    last = jnp.cumsum(counts)

    def run(index, carry):
        group = jnp.searchsorted(last, index, side="right", method="compare_all")
        first = groups.starts[group] + (index - last[group] + counts[group]) * size
        # The last rows are read from an earlier row on, so that they fill a block.
        start = jnp.minimum(first, rows - size)
        row = start + jnp.arange(size, dtype=start.dtype)
        is_member = (row >= first) & (row < groups.ends[group])
        return step(Block(group, start, is_member[:, None]), carry)

    return lax.fori_loop(0, last[-1], run, match_varying_axes((initial, groups))[0])


@jax.jit  # else eager calls would compile the loop each time
def run(call: Products) -> Float[Array, "rows out"]:
    """Computes `y_i = x_i W_g(i)`."""
    x, kernels, groups = call
    rows, out = x.shape[0], kernels.shape[-1]
    initial = jnp.zeros((rows, out), x.dtype)
    if not (rows and kernels.shape[0]):
        return initial
    read = partial(lax.dynamic_slice_in_dim, slice_size=block_size(rows, kernels.shape[0]))

    def step(block: Block, y):
        product = read(x, block.start) @ kernels[block.group]
        new = jnp.where(block.is_member, product, read(y, block.start))
        return lax.dynamic_update_slice_in_dim(y, new, block.start, axis=0)

    return over_blocks(rows, groups, step, initial)


@jax.jit
def run_outer(call: OuterProducts) -> Float[Array, "groups features out"]:
    """Computes `Σ_i x_i y_iᵀ` over the rows of each group."""
    x, y, groups = call
    rows, count = x.shape[0], len(groups.ends)
    wide = carry_dtype(x.dtype)
    initial = jnp.zeros((count, x.shape[1], y.shape[1]), wide)
    if not (rows and count):
        return initial.astype(x.dtype)
    size = block_size(rows, count)
    columns = x.T  # transposed once, because a CPU multiplies by a transposed block slowly

    def step(block: Block, sums):
        of_x = lax.dynamic_slice_in_dim(columns, block.start, size, axis=1)
        of_y = lax.dynamic_slice_in_dim(y, block.start, size)
        # Zeros on both sides, because 0 times the NaN of another group's row would be NaN.
        of_x = jnp.where(block.is_member.T, of_x, 0)
        of_y = jnp.where(block.is_member, of_y, 0)
        new = sums[block.group] + jnp.dot(of_x, of_y, preferred_element_type=wide)
        return lax.dynamic_update_index_in_dim(sums, new, block.group, axis=0)

    return over_blocks(rows, groups, step, initial).astype(x.dtype)
