"""Matrix products of groups of rows, each group with a matrix of its own."""

from typing import Annotated, Any

from jaxtyping import Array, Float, Int

from jax_models.checks.arguments import checked
from jax_models.ops.forms import Form, Operator
from jax_models.ops.grouped import blocks, definition, ragged
from jax_models.ops.grouped.definition import Groups, OuterProducts, Products
from jax_models.ops.linear_map import linear_map
from jax_models.ops.shard_map_axes import match_varying_axes


def dot_derivative(operator: Operator, method: str, call: Products, d_call: Products):
    """Returns the products and their tangents, which consist of grouped products."""
    tangents = d_call.x, d_call.kernels
    return operator(call, method), linear_map(_dot_tangent, _dot_gradient, call, tangents, method)


def _dot_tangent(method: str, call: Products, tangents):
    """`dy_i = dx_i W_g(i) + x_i dW_g(i)`."""
    d_x, d_kernels = tangents
    of_x = GROUPED_DOT(call._replace(x=d_x), method)
    return of_x + GROUPED_DOT(call._replace(kernels=d_kernels), method)


def _dot_gradient(method: str, call: Products, dy):
    """The transpose of `_dot_tangent`."""
    d_x = GROUPED_DOT(Products(dy, call.kernels.mT, call.groups), method)
    return d_x, GROUPED_OUTER(OuterProducts(call.x, dy, call.groups), method)


def outer_derivative(operator: Operator, method: str, call: OuterProducts, d_call: OuterProducts):
    """Returns the sums and their tangents, which consist of such sums."""
    tangents = d_call.x, d_call.y
    return operator(call, method), linear_map(
        _outer_tangent, _outer_gradient, call, tangents, method
    )


def _outer_tangent(method: str, call: OuterProducts, tangents):
    """`dW_g = Σ_i dx_i y_iᵀ + x_i dy_iᵀ`."""
    d_x, d_y = tangents
    of_x = GROUPED_OUTER(call._replace(x=d_x), method)
    return of_x + GROUPED_OUTER(call._replace(y=d_y), method)


def _outer_gradient(method: str, call: OuterProducts, d_kernels):
    """The transpose of `_outer_tangent`."""
    d_x = GROUPED_DOT(Products(call.y, d_kernels.mT, call.groups), method)
    return d_x, GROUPED_DOT(Products(call.x, d_kernels, call.groups), method)


def _forms(by_ragged: Any, by_blocks: Any, by_definition: Any) -> tuple[Form, ...]:
    """The forms of an operator, with the function that runs each."""
    return (
        Form("ragged", by_ragged, ("cuda", "tpu"), ragged.refusal),
        Form("blocks", by_blocks, refusal=blocks.refusal, pays=blocks.pays),
        Form("definition", by_definition),
    )


GROUPED_DOT = Operator(
    "grouped_dot",
    _forms(ragged.run, blocks.run, definition.run),
    derivative=dot_derivative,
)
GROUPED_OUTER = Operator(
    "grouped_outer",
    _forms(ragged.run_outer, blocks.run_outer, definition.run_outer),
    derivative=outer_derivative,
)
"""The gradient of the matrices: the sum of outer products of each group's rows."""

GroupedDotMethod = Annotated[str, GROUPED_DOT.checked_method]
"""What runs the products."""


@checked()
def grouped_dot(
    x: Float[Array, "rows features"],
    kernels: Float[Array, "groups features out"],
    sizes: Int[Array, " groups"],
    *,
    method: GroupedDotMethod = "auto",
) -> Float[Array, "rows out"]:
    """Multiplies each row by the matrix of its group: `y_i = x_i W_g(i)`.

        >>> x, kernels = jnp.ones((5, 8)), jnp.ones((3, 8, 16))
        >>> y = grouped_dot(x, kernels, jnp.array([2, 0, 3]))

    The rows are sorted: the first `sizes[0]` belong to the first group, the next `sizes[1]` to the
    second, and so on. Rows after the last group give zeros. The work depends on the rows and not on
    the number of groups.

    `method` names the form that runs: "ragged" (`jax.lax.ragged_dot`), which "auto" chooses on a
    GPU and a TPU; "blocks", which multiplies blocks of the rows of one group, and which "auto"
    chooses elsewhere; or "definition", which copies a matrix for each row, and which "auto" chooses
    for few rows with small matrices.

    Raises:
        NotImplementedError: the form does not support the call.
        ValueError: there is no such method, or the shapes do not fit each other.

    """
    return GROUPED_DOT(match_varying_axes(Products(x, kernels, Groups.of(sizes))), method)
