"""The grouped products as their equations."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Groups(NamedTuple):
    """The groups of sorted rows: group g consists of the rows from `starts[g]` to `ends[g]`."""

    starts: Int[Array, " groups"]
    ends: Int[Array, " groups"]

    @staticmethod
    def of(sizes: Int[Array, " groups"]) -> "Groups":
        """Returns the groups of these sizes, one after the other."""
        ends = jnp.cumsum(sizes)
        return Groups(ends - sizes, ends)

    def members(self, row: Int[Array, "*rows"]) -> Array:
        """Returns whether each row (…, 1) is in each group (…, groups)."""
        return (row[..., None] >= self.starts) & (row[..., None] < self.ends)


class Products(NamedTuple):
    """A call of `ops.grouped_dot`."""

    x: Float[Array, "rows in"]
    kernels: Float[Array, "groups in out"]
    groups: Groups


class OuterProducts(NamedTuple):
    """A call for the sums of outer products of x and y, one sum for each group."""

    x: Float[Array, "rows in"]
    y: Float[Array, "rows out"]
    groups: Groups


def run(call: Products) -> Float[Array, "rows out"]:
    """Computes `y_i = x_i W_g(i)`."""
    row = jnp.arange(call.x.shape[0], dtype=call.groups.ends.dtype)
    group = jnp.searchsorted(call.groups.ends, row, side="right")
    y = jnp.einsum("ri,rio->ro", call.x, call.kernels.at[group].get(mode="fill", fill_value=0))
    return y


def run_outer(call: OuterProducts) -> Float[Array, "groups in out"]:
    """Computes `Σ_i x_i y_iᵀ` over the rows of each group."""
    row = jnp.arange(call.x.shape[0], dtype=call.groups.ends.dtype)
    is_member = call.groups.members(row).astype(call.x.dtype)
    return jnp.einsum("rg,ri,ro->gio", is_member, call.x, call.y)
