"""Grouped products by `jax.lax.ragged_dot`, which accelerators have kernels for."""

from jax import lax
from jax.custom_batching import sequential_vmap
from jax.export import is_symbolic_dim
from jaxtyping import Array, Float

from jax_models.ops.grouped.definition import OuterProducts, Products

OUTER = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def refusal(call: Products | OuterProducts) -> str | None:
    """`ragged_dot` needs to know the sizes."""
    arrays = call[:2]
    if any(is_symbolic_dim(size) for array in arrays for size in array.shape):
        return "it needs sizes that are known"
    return None


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
