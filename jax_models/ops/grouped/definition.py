"""The grouped products as their equations."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_models.ops.affine import carry_dtype


class Groups(NamedTuple):
    """The groups of sorted rows: group g consists of the rows from `starts[g]` to `ends[g]`."""

    starts: Int[Array, " groups"]
    ends: Int[Array, " groups"]

    @staticmethod
    def of(sizes: Int[Array, " groups"]) -> "Groups":
        """Returns the groups of these sizes, one after the other."""
        ends = jnp.cumsum(sizes)
        return Groups(ends - sizes, ends)

    def of_rows(self, count: int) -> Int[Array, " rows"]:
        """Returns the group of each row, or the number of groups for rows after the last group."""
        row = jnp.arange(count, dtype=self.ends.dtype)
        return jnp.searchsorted(self.ends, row, side="right", method="compare_all")


class Products(NamedTuple):
    """A call of `ops.grouped_dot`."""

    x: Float[Array, "rows features"]
    kernels: Float[Array, "groups features out"]
    groups: Groups


class OuterProducts(NamedTuple):
    """A call for the sums of outer products of x and y, one sum for each group."""

    x: Float[Array, "rows features"]
    y: Float[Array, "rows out"]
    groups: Groups


def run(call: Products) -> Float[Array, "rows out"]:
    """Computes `y_i = x_i W_g(i)`."""
    groups, _, out = call.kernels.shape
    if groups == 0:
        return jnp.zeros((call.x.shape[0], out), call.x.dtype)
    group = call.groups.of_rows(call.x.shape[0])
    x = jnp.where((group < groups)[:, None], call.x, 0)
    return jnp.einsum("ri,rio->ro", x, call.kernels.at[group].get(mode="fill", fill_value=0))


def run_outer(call: OuterProducts) -> Float[Array, "groups features out"]:
    """Computes `Σ_i x_i y_iᵀ` over the rows of each group."""
    group = call.groups.of_rows(call.x.shape[0])
    wide = carry_dtype(call.x.dtype)
    products = jnp.einsum("ri,ro->rio", call.x, call.y, preferred_element_type=wide)
    return jax.ops.segment_sum(products, group, len(call.groups.ends)).astype(call.x.dtype)
