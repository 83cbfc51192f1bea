"""The matrix products of a recurrence, and their tangents for all steps at once."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.export import is_symbolic_dim
from jaxtyping import Array, Float

from jax_models.ops.affine import affine, carry_dtype
from jax_models.ops.rows import Rows


class Product(NamedTuple):
    """The product `h W + b`, to which `x_t W_x + b_x` is added if there is a `kernel_x`."""

    kernel: Float[Array, "*blocks in out"]
    bias: Float[Array, " blocks*out"] | None = None
    kernel_x: Float[Array, "in_x out_x"] | None = None
    bias_x: Float[Array, " out_x"] | None = None

    def gates(self, names: str) -> dict[str, "Product"]:
        """Splits a product whose weights have the gates side by side into one product per gate."""
        return {
            name: jax.tree.map(lambda a: jnp.split(a, len(names), axis=-1)[i], self)  # noqa: B023
            for i, name in enumerate(names)
        }

    @staticmethod
    def stored(of_x: Array | None, of_h: Array) -> Array:
        """Combines a step's two products into the array that is stored for the backward pass."""
        return of_h if of_x is None else of_x + of_h

    @staticmethod
    def received(of_x: Array | None, stored: Array) -> Any:
        """Returns the value that a step receives: the sum of both products, which is stored."""
        return stored


class Pair(Product):
    """A product of x and one of h, of which a step receives both instead of the sum."""

    @staticmethod
    def stored(of_x: Array | None, of_h: Array) -> Array:
        """Returns only the product of h, because that of x is computed before the loop."""
        return of_h

    @staticmethod
    def received(of_x: Array | None, stored: Array) -> Any:
        """Returns the value that a step receives: the two products."""
        return of_x, stored


class Step(NamedTuple):
    """The arguments of a step, apart from the state."""

    products: Callable[[Sequence[str], Array], list[Any]]
    """`products(names, h)` returns the products of h with these names, as one matrix product.

    A step asks for each name once.
    """
    inputs: Any
    params: Any

    def product(self, name: str, h: Array) -> Any:
        """Returns a single product of h."""
        return self.products([name], h)[0]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("state", "products", "x", "inputs", "params", "rows"),
    meta_fields=("step", "reverse"),
)
@dataclasses.dataclass(frozen=True)
class Recurrence:
    """A call of `ops.recurrence`, whose arguments it contains."""

    step: Callable[[Any, Step], Any]
    state: Any
    products: dict[str, Product]
    x: Float[Array, "batch time in"]
    inputs: Any
    params: Any
    rows: Rows
    reverse: bool

    def products_of_x(self) -> dict[str, Array | None]:
        """The products of x for all steps, by name.

        Each is an array of its own, because XLA's CPU backend reads columns of a wide one slowly.
        """
        return {
            name: None if p.kernel_x is None else affine(self.x, p.kernel_x, p.bias_x)
            for name, p in self.products.items()
        }


def known_length(time: int) -> int | None:
    """The length that `lax.scan` takes. None if it is symbolic: read from the arrays."""
    return None if is_symbolic_dim(time) else time


def where(mask: Array | None, x: Any, y: Any) -> Any:
    """Takes the rows of the mask from the state x and the others from y. No mask: all from y."""
    if mask is None:
        return y
    return jax.tree.map(lambda a, b: jnp.where(mask[:, None], a, b), x, y)


def merge_products(names: Sequence[str], group: Sequence[Product]) -> Product:
    """Merges the products of a group into one, side by side."""
    if len(group) == 1:
        return group[0]
    forms = {str(jax.tree.map(lambda a: a.shape[:-1], tuple(product))) for product in group}
    if len(forms) > 1 or group[0].kernel.ndim == 3:
        raise ValueError(
            f"step: expected products that are asked for together to agree in which of kernel_x, "
            f"bias and bias_x they have, and to have no kernel in blocks, got {[*names]}"
        )
    group = [Product(*product) for product in group]  # a Pair is a tree of another type
    return jax.tree.map(lambda *a: jnp.concatenate(a, axis=-1), *group)


def split_values(values: Array, widths: Sequence[int]) -> list[Array]:
    """Splits the values of a merged product into those of each product."""
    return jnp.split(values, np.cumsum(widths)[:-1], axis=-1)


def widths_of(group: Sequence[Product]) -> list[int]:
    return [product.kernel.shape[-1] for product in group]


def dense_tangent(x, tangent):
    return jnp.zeros_like(x) if isinstance(tangent, SymbolicZero) else tangent


def merge_tangents(group: Sequence[Product], tangents: Sequence[Product]) -> Product:
    """Merges the tangents of products as `merge_products` does the products."""
    if len(group) == 1:
        return tangents[0]

    def merged(primals, tangents) -> Any:
        if all(map(is_zero, tangents)):
            return None
        return jnp.concatenate([*map(dense_tangent, primals, tangents)], axis=-1)

    return Product(*map(merged, zip(*group, strict=True), zip(*tangents, strict=True)))


def direct_tangents(group: Sequence[Product], merged: Product, tangent: Product, x, d_x, h):
    """Returns `h dW + db` of all steps for each product, and `dx W_x + x dW_x + db_x`."""
    widths, of_x = widths_of(group), [None] * len(group)
    of_h = _affine_tangent(h, None, merged.kernel, tangent.kernel, tangent.bias)
    if merged.kernel_x is not None:
        kernel_x = merged.kernel_x, tangent.kernel_x, tangent.bias_x
        of_x = split_values(_affine_tangent(x, d_x, *kernel_x), widths)
    return split_values(of_h, widths), of_x


def _affine_tangent(x, d_x, kernel, d_kernel, d_bias):
    dtype = carry_dtype(kernel.dtype)
    out = kernel.shape[-1] * (1 if kernel.ndim == 2 else kernel.shape[0])
    result = jnp.zeros((*x.shape[:-1], out), dtype)
    if not is_zero(d_x):
        result += affine(d_x, kernel)
    if not is_zero(d_kernel):
        result += affine(x, d_kernel)
    if not is_zero(d_bias):
        result += jnp.broadcast_to(d_bias.astype(dtype), result.shape)
    return result


def is_zero(tangent) -> bool:
    return tangent is None or isinstance(tangent, SymbolicZero)


def transposable_kernel(kernel):
    """Returns the kernel transposed, so that the backward pass multiplies by a plain matrix.

    The barrier stops XLA from undoing the transpose.
    """
    return kernel if kernel.ndim == 3 else lax.optimization_barrier(kernel.T)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def computed_before(widths: tuple[int, ...], h, kernel, values):
    """Returns `values`, which are already computed: h W plus terms that do not depend on h.

    The tangents of `values` are those of the other terms. This function adds dh W to them.
    """
    return values


@computed_before.defjvp
def _computed_before_jvp(widths, primals, tangents):
    _, kernel, values = primals
    d_h, _, d_values = tangents
    if kernel.ndim == 3:
        of_h = affine(d_h, kernel)
    else:
        contract = (((1,), (1,)), ((), ()))
        dtype = carry_dtype(kernel.dtype)
        of_h = lax.dot_general(
            d_h.astype(kernel.dtype), kernel, contract, preferred_element_type=dtype
        )
    return values, [*map(jnp.add, d_values, split_values(of_h, widths))]
