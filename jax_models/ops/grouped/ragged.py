"""Grouped products by `jax.lax.ragged_dot`, which accelerators have kernels for."""

from jax import lax
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float

from jax_models.ops.forms import refusal_of_symbolic
from jax_models.ops.grouped.definition import OuterProducts, Products

OUTER = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def refusal(call: Products | OuterProducts) -> str | None:
    """Returns why there is no `ragged_dot` for the call, or None if there is one."""
    return refusal_of_symbolic(*call[0].shape, *call[1].shape)


@sequential_vmap  # because `ragged_dot` cannot be mapped over the sizes of the groups alone
def run(call: Products) -> Float[Array, "rows out"]:
    """Computes `y_i = x_i W_g(i)`."""
    groups = call.groups
    return lax.ragged_dot(call.x, call.kernels, groups.ends - groups.starts)


@sequential_vmap
def run_outer(call: OuterProducts) -> Float[Array, "groups features out"]:
    """Computes `Σ_i x_i y_iᵀ` over the rows of each group."""
    groups = call.groups
    return lax.ragged_dot_general(call.x, call.y, groups.ends - groups.starts, OUTER)
