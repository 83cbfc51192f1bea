"""Matrix products of groups of rows, each group with a matrix of its own."""

from functools import partial
from typing import Annotated, Any

from jaxtyping import Array, Float, Int

from jax_models.checks.arguments import checked
from jax_models.ops.forms import Form, Operator
from jax_models.ops.grouped import blocks, definition, ragged
from jax_models.ops.grouped.definition import Groups, OuterProducts, Products
from jax_models.ops.linear_map import linear_map
from jax_models.ops.shard_map_axes import match_varying_axes


def _derivative(gradient: Any, operator: Operator, method: str, call: Any, d_call: Any):
    """Returns the products and their tangents, which consist of such products."""
    d_arrays = d_call[:2]
    return operator(call, method), linear_map(_tangent, gradient, call, d_arrays, operator, method)


def _tangent(operator: Operator, method: str, call: Products | OuterProducts, tangents):
    """The product rule, such as `dy_i = dx_i W_g(i) + x_i dW_g(i)`."""
    (first, second, groups), (d_first, d_second) = call, tangents
    of_first = operator(type(call)(d_first, second, groups), method)
    return of_first + operator(type(call)(first, d_second, groups), method)


def _dot_gradient(operator: Operator, method: str, call: Products, dy):
    """The transpose of the tangent of products."""
    d_x = GROUPED_DOT(Products(dy, call.kernels.mT, call.groups), method)
    return d_x, GROUPED_OUTER(OuterProducts(call.x, dy, call.groups), method)


def _outer_gradient(operator: Operator, method: str, call: OuterProducts, d_kernels):
    """The transpose of the tangent of outer products."""
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
    derivative=partial(_derivative, _dot_gradient),
)
GROUPED_OUTER = Operator(
    "grouped_outer",
    _forms(ragged.run_outer, blocks.run_outer, definition.run_outer),
    derivative=partial(_derivative, _outer_gradient),
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
    GPU and a TPU; "blocks", which multiplies blocks of the rows of one group, the choice of "auto"
    elsewhere; or "definition", which copies a matrix for each row, the choice of "auto" elsewhere
    for few rows with small matrices.

    Raises:
        NotImplementedError: the form does not support the call.
        ValueError: there is no such method, or the shapes do not fit each other.

    """
    return GROUPED_DOT(match_varying_axes(Products(x, kernels, Groups.of(sizes))), method)
