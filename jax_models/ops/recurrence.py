"""A nonlinear recurrence over a sequence. The weights' gradients are computed after the loop."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim
from jaxtyping import Array, Float

from jax_models.ops.affine import affine, common_carry_dtype
from jax_models.ops.arguments import checked
from jax_models.ops.checks import as_array, checked_array, described, wrong_shape
from jax_models.ops.products import (
    Pair,
    Product,
    computed_before,
    dense_tangent,
    direct_tangents,
    merge_products,
    merge_tangents,
    split_values,
    transposable_kernel,
    widths_of,
)
from jax_models.ops.rows import Masks, Rows, given_rows
from jax_models.ops.shard_map_axes import match_varying_axes

State = TypeVar("State", bound=tuple)


def sigmoid(x: Array) -> Array:
    """`σ(x)`, computed with tanh because that is faster on a CPU."""
    return 0.5 + 0.5 * jnp.tanh(0.5 * x)


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


@checked()
def recurrence(
    step: Callable[[State, Step], State],
    state: State,
    products: dict[str, Product],
    x: Float[Array, "batch time in"],
    *,
    inputs: Any = None,
    params: Any = None,
    reverse: bool = False,
    **masks: Unpack[Masks],
) -> tuple[Float[Array, "batch time out"], State]:
    """Runs `s_t = step(s_{t−1}, …)` for t = 0 … T−1, or for t = T−1 … 0 with `reverse`.

    The derivative of a product has one term that depends on the tangent of the state, dh_t. The
    terms in parentheses do not, so they are computed for all steps at once, outside the loop:

        z_t = x_t W_x + h_t W        dz_t = dh_t W + (dx_t W_x + x_t dW_x + h_t dW)

    JAX transposes this derivative to make the backward pass. Its loop therefore has one matrix
    product for each product of the forward pass, and after the loop, the gradient of each weight is
    a single matrix product. Forward mode and higher derivatives work as usual.

    Args:
        step: the equation. Use a function of a module, not a closure made for each call, because
            JAX caches compiled programs by the function.
        state: a NamedTuple of arrays (batch, features), whose first field is the output.
        products: the products that the step asks for, by name.
        x: the inputs that each `kernel_x` multiplies.
        inputs: other arrays (batch, time, …), of which each step receives its own slice.
        params: other arrays, which every step receives whole.
        reverse: run from the last step to the first.
        **masks: `lengths` and `reset`, as in `Masks`. At a `reset`, the state restarts from zero.

    Returns:
        The outputs of all steps and the last state. Outputs beyond `lengths` are meaningless.

    Raises:
        TypeError: the state, the inputs or the parameters are not arrays.
        ValueError: a shape is wrong, there is no product, or a `bias_x` comes without a `kernel_x`.
            Also if the step does not ask for each product exactly once, or returns a state of other
            shapes or dtypes.

    """
    # Check the arguments that annotations cannot describe.
    batch, time, features = x.shape
    kernels = [product.kernel for product in products.values()]
    if not kernels:
        raise ValueError("products: expected at least one, got none")
    state = _checked_state(state, batch, common_carry_dtype(*kernels))
    inputs = jax.tree.map(partial(as_array, "inputs"), inputs)
    params = jax.tree.map(partial(as_array, "params"), params)
    for array in jax.tree.leaves(inputs):
        if array.shape[:2] != (batch, time):
            raise wrong_shape("inputs", (batch, time, "…"), array.shape)
    for name, product in products.items():
        if product.kernel_x is None and product.bias_x is not None:
            raise ValueError(f"products[{name!r}].bias_x: expected None without kernel_x, got one")
        if product.kernel_x is not None and product.kernel_x.shape[0] != features:
            expected = (features, product.kernel_x.shape[1])
            raise wrong_shape(f"products[{name!r}].kernel_x", expected, product.kernel_x.shape)
    if time == 0:
        return jnp.zeros((batch, 0, state[0].shape[1]), state[0].dtype), state
    static = _Static(step, reverse)
    return _batch_first(static, products, x, inputs, params, state, given_rows(masks))


def _checked_state(state: State, batch: int, dtype: jnp.dtype) -> State:
    """Returns the state in the dtype of the loop, or raises an error."""
    fields: Any = getattr(state, "_fields", None)
    if fields is None:
        raise TypeError(f"state: expected a NamedTuple of arrays, got {described(state)}")

    def checked_field(field: str, value: Any) -> Array:
        array = checked_array(f"state.{field}", value, Float)
        if array.ndim != 2 or array.shape[0] != batch:
            raise wrong_shape(f"state.{field}", (batch, "features"), array.shape)
        return array.astype(dtype)

    return type(state)(*map(checked_field, fields, state))


class _Static(NamedTuple):
    """The arguments that are not arrays."""

    step: Callable
    reverse: bool

    def scan(self, body, state, inputs, length: int):
        """`lax.scan` in the direction of the recurrence."""
        known = None if is_symbolic_dim(length) else length  # None: read from the inputs
        return lax.scan(body, state, inputs, known, reverse=self.reverse)


@partial(jax.jit, static_argnums=0)  # else eager calls would compile the scan each time
def _batch_first(static: _Static, products, x, inputs, params, state, rows: Rows):
    masks = rows.active, rows.restarts(reverse=static.reverse)
    products, x, inputs, params, state, masks = match_varying_axes(
        (products, x, inputs, params, state, masks)
    )
    steps_first = partial(jax.tree.map, lambda a: jnp.swapaxes(a, 0, 1))
    ys, state = _recurrence(
        static, products, *steps_first((x, inputs)), params, state, *steps_first(masks)
    )
    return jnp.swapaxes(ys, 0, 1), state


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _recurrence(static: _Static, products, x, inputs, params, state, active, reset):
    ys, last, *_ = _forward(static, products, x, inputs, params, state, active, reset)
    return ys, last


def _forward(static: _Static, products, x, inputs, params, state, active, reset):
    """Returns the outputs, the last state, and the arrays that the backward pass needs."""
    # XLA's CPU backend reads columns of a wide array slowly, so each product of x is a separate
    # array. In a step, it is fastest to compute all products of the same h together.
    of_x = {
        name: None if p.kernel_x is None else affine(x, p.kernel_x, p.bias_x)
        for name, p in products.items()
    }

    def body(state, at_step):
        inputs, of_x, active, reset = at_step
        state = _where(reset, jax.tree.map(jnp.zeros_like, state), state)
        kept, h_kept = {}, {}

        def values(names, h):
            requested = [name for group in [*kept, names] for name in group]
            if len({*requested}) < len(requested) or not {*requested} <= products.keys():
                raise ValueError(
                    f"step: expected each of the products {[*products]} once, "
                    f"it asked for {requested}"
                )
            names = (*names,)
            group = [products[name] for name in names]
            merged = merge_products(names, group)  # XLA moves this out of the loop
            of_h = split_values(affine(h, merged.kernel, merged.bias), widths_of(group))
            parts = zip(names, group, of_h, strict=True)
            kept[names] = [product.stored(of_x[name], part) for name, product, part in parts]
            # If h is a field of the state, it is already stored with the state.
            fields[names] = next((i for i, field in enumerate(state) if field is h), None)
            if fields[names] is None:
                h_kept[names] = h
            return _values(products, of_x, names, kept[names])

        new = static.step(state, Step(values, inputs, params))
        if _types(new) != _types(state):
            raise ValueError(f"step: expected to return {_types(state)}, it returned {_types(new)}")
        requested = {name for names in kept for name in names}
        if requested != products.keys():
            raise ValueError(f"step: expected products {[*products]}, it asked for {[*requested]}")
        new = new if active is None else _where(active, new, state)
        return new, (new[0], state, kept, h_kept)

    fields = {}
    at_steps = (inputs, of_x, active, reset)
    last, (ys, before, kept, h_kept) = static.scan(body, state, at_steps, x.shape[0])
    h = {names: h_kept[names] if i is None else before[i] for names, i in fields.items()}
    return ys, last, _Residuals(before, of_x, h, kept)


class _Residuals(NamedTuple):
    """The arrays (time, batch, features) that the backward pass needs."""

    before: Any
    """The state before each step."""
    of_x: dict[str, Array | None]
    """The products of x, by name."""
    h: dict[tuple[str, ...], Array]
    """The h of each group of products that a step requests together."""
    kept: dict[tuple[str, ...], list[Array]]
    """The results of `Product.stored` for the products of each group."""


def _values(products: dict[str, Product], of_x, names, kept) -> list[Any]:
    """Returns the values that a step receives for the products of a group."""
    return [products[name].received(of_x[name], a) for name, a in zip(names, kept, strict=True)]


def _where(mask, x, y):
    """Takes the rows of the mask from the state x and the others from y. No mask: all from y."""
    if mask is None:
        return y
    return jax.tree.map(lambda a, b: jnp.where(mask[:, None], a, b), x, y)


def _types(state) -> Any:
    return jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", state)


@partial(_recurrence.defjvp, symbolic_zeros=True)
def _recurrence_jvp(static: _Static, primals, tangents):
    products, x, inputs, params, state, active, reset = primals
    d_products, d_x, d_inputs, d_params, d_state, *_ = tangents
    ys, last, (before, of_x, h, kept) = _forward(static, *primals)
    of_x = {name: a if isinstance(products[name], Pair) else None for name, a in of_x.items()}
    instantiate = partial(jax.tree.map, dense_tangent)

    # The tangents of the products that do not depend on the state's tangent, over all steps.
    d_kept, d_of_x, transposable = {}, {}, {}
    for names in kept:
        group = [products[name] for name in names]
        merged = merge_products(names, group)
        tangents = merge_tangents(group, [d_products[name] for name in names])
        d_of_h, of_group = direct_tangents(group, merged, tangents, x, d_x, h[names])
        by_name = [*zip(names, group, of_group, d_of_h, strict=True)]
        d_kept[names] = [product.stored(a, b) for _, product, a, b in by_name]
        d_of_x |= {name: a if of_x[name] is not None else None for name, _, a, _ in by_name}
        transposable[names] = transposable_kernel(merged.kernel)

    # The loop is linear in the state's tangent, so JAX can transpose it for the backward pass.
    @partial(jax.checkpoint, prevent_cse=False)
    def body(d_state, at_step):
        primals, tangents, active, reset = at_step

        def step(state, kept, of_x, inputs, params):
            def values(names, h):
                names = (*names,)
                widths = tuple(widths_of([products[name] for name in names]))
                stored = computed_before(widths, h, transposable[names], kept[names])
                return _values(products, of_x, names, stored)

            return static.step(state, Step(values, inputs, params))

        d_state = _where(reset, jax.tree.map(jnp.zeros_like, d_state), d_state)
        _, d_new = jax.jvp(step, (*primals, params), (d_state, *tangents, dense_params))
        d_new = d_new if active is None else _where(active, d_new, d_state)
        return d_new, d_new[0]

    dense_params = instantiate(params, d_params)
    tangents = d_kept, d_of_x, instantiate(inputs, d_inputs)
    at_steps = (before, kept, of_x, inputs), tangents, active, reset
    d_last, d_ys = static.scan(body, instantiate(state, d_state), at_steps, x.shape[0])
    return (ys, last), (d_ys, d_last)
