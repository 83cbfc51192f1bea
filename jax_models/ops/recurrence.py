"""A nonlinear recurrence over a sequence, whose weights' gradients are taken after its loop."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int

from jax_models.ops.affine import affine, carry_dtype, common_carry_dtype
from jax_models.ops.checks import as_array, checked, checked_array, described, wrong_shape
from jax_models.ops.segments import segments
from jax_models.ops.varying import alike

State = TypeVar("State", bound=tuple)


class Product(NamedTuple):
    """`h ↦ h W + b`, to which `x_t W_x + b_x` is added if there is a kernel for it."""

    kernel: Float[Array, "*blocks in out"]
    bias: Float[Array, " blocks*out"] | None = None
    kernel_x: Float[Array, "in_x out_x"] | None = None
    bias_x: Float[Array, " out_x"] | None = None

    def gates(self, names: str) -> dict[str, "Product"]:
        """A product for each gate, of weights that have the gates side by side."""
        return {
            name: jax.tree.map(lambda a: jnp.split(a, len(names), axis=-1)[i], self)  # noqa: B023
            for i, name in enumerate(names)
        }

    @staticmethod
    def kept(of_x: Array | None, of_h: Array) -> Array:
        """What the backward pass needs of a step's two products."""
        return of_h if of_x is None else of_x + of_h

    @staticmethod
    def value(of_x: Array | None, kept: Array) -> Any:
        """What a step gets: the sum of both products."""
        return kept


class Pair(Product):
    """A product of x and one of h; a step gets both."""

    @staticmethod
    def kept(of_x: Array | None, of_h: Array) -> Array:
        """The product of h alone, since the product of x is computed before the loop."""
        return of_h

    @staticmethod
    def value(of_x: Array | None, kept: Array) -> Any:
        """What a step gets: the two products."""
        return of_x, kept


def sigmoid(x: Array) -> Array:
    """`σ(x)` by tanh, which XLA computes faster on a CPU."""
    return 0.5 + 0.5 * jnp.tanh(0.5 * x)


class Step(NamedTuple):
    """What a step has besides the state."""

    products: Callable[[Sequence[str], Array], list[Any]]
    """`products(names, h)`: the values of these products of h, computed as one matrix product.

    A step asks for each name once.
    """
    inputs: Any
    params: Any

    def product(self, name: str, h: Array) -> Any:
        """The value of one product."""
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
    lengths: Int[Array, " batch"] | None = None,
    reset: Bool[Array, "batch time"] | None = None,
    reverse: bool = False,
) -> tuple[Float[Array, "batch time out"], State]:
    """`s_t = step(s_{t−1}, …)` for t = 0 … T−1, or T−1 … 0 with `reverse`.

    The derivative of a step needs one product with each kernel, by the tangents of what the state
    was multiplied with; the tangents of the kernels and of x enter it through sums that are taken
    over the whole sequence at once:

        z_t = x_t W_x + h_t W        dz_t = dh_t W + (dx_t W_x + x_t dW_x + h_t dW)

    So the loop of the backward pass, which JAX makes by transposing this one, has one product for
    each of the forward pass, and all gradients of weights are single products after it. It is a
    derivative like any other: forward mode and higher derivatives work.

    Args:
        step: the equation. A module's function, not a closure: it is a key of JAX's caches.
        state: a NamedTuple of arrays (batch, features), its first field the output.
        products: by name.
        x: what `kernel_x` multiplies.
        inputs: other arrays (batch, time, …) of which each step sees its own.
        params: other arrays that every step sees.
        lengths: row b takes only the steps t < lengths[b]; the others leave its state alone.
        reset: the first steps of packed documents, where the state restarts from zero. With
            `reverse` it restarts where the scan *enters* a document, at the document's last step.
        reverse: run from the last step to the first.

    Returns:
        The outputs of every step (those beyond `lengths` carry no meaning), and the last state.

    Raises:
        TypeError: the state, the inputs or the parameters are not arrays.
        ValueError: a shape is wrong, there is no product, a `bias_x` has no kernel_x, or the step
            does not ask for each product once, or returns another state.

    """
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
    return _batch_first(static, products, x, inputs, params, state, lengths, reset)


def _checked_state(state: State, batch: int, dtype: jnp.dtype) -> State:
    """The state in the dtype of the loop, or the fault."""
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
    step: Callable
    reverse: bool

    def scan(self, body, state, inputs, length: int):
        """`lax.scan` in the direction of the recurrence."""
        known = None if is_symbolic_dim(length) else length
        return lax.scan(body, state, inputs, known, reverse=self.reverse)


@partial(jax.jit, static_argnums=0)  # outside a jit, each call would compile anew
def _batch_first(static: _Static, products, x, inputs, params, state, lengths, reset):
    masks = segments(x.shape[1], lengths, reset, reverse=static.reverse)
    products, x, inputs, params, state, masks = alike((products, x, inputs, params, state, masks))
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
    """The outputs, the last state, and what the backward pass needs."""
    # XLA's CPU backend reads columns of a wide array slowly, so each product of x is an array of
    # its own. The products of h in a step are fastest as one.
    of_x = {
        name: None if p.kernel_x is None else affine(x, p.kernel_x, p.bias_x)
        for name, p in products.items()
    }

    def body(state, at_step):
        inputs, of_x, active, reset = at_step
        state = _where(reset, jax.tree.map(jnp.zeros_like, state), state)
        kept, h_kept = {}, {}

        def values(names, h):
            asked = [name for group in [*kept, names] for name in group]
            if len({*asked}) < len(asked) or not {*asked} <= products.keys():
                raise ValueError(
                    f"step: expected each of the products {[*products]} once, it asked for {asked}"
                )
            names = (*names,)
            group = [products[name] for name in names]
            merged = _merged(names, group)
            of_h = _apart(affine(h, merged.kernel, merged.bias), _widths(group))
            parts = zip(names, group, of_h, strict=True)
            kept[names] = [product.kept(of_x[name], part) for name, product, part in parts]
            # An h that is a field of the state is stored once.
            fields[names] = next((i for i, field in enumerate(state) if field is h), None)
            if fields[names] is None:
                h_kept[names] = h
            return _values(products, of_x, names, kept[names])

        new = static.step(state, Step(values, inputs, params))
        if _kinds(new) != _kinds(state):
            raise ValueError(f"step: expected to return {_kinds(state)}, it returned {_kinds(new)}")
        asked = {name for names in kept for name in names}
        if asked != products.keys():
            raise ValueError(f"step: expected products {[*products]}, it asked for {[*asked]}")
        new = new if active is None else _where(active, new, state)
        return new, (new[0], state, kept, h_kept)

    fields = {}
    at_steps = (inputs, of_x, active, reset)
    last, (ys, before, kept, h_kept) = static.scan(body, state, at_steps, x.shape[0])
    h = {names: h_kept[names] if i is None else before[i] for names, i in fields.items()}
    return ys, last, _Residuals(before, of_x, h, kept)


class _Residuals(NamedTuple):
    """What the backward pass needs, in arrays (time, batch, features)."""

    before: Any
    """The state before each step."""
    of_x: dict[str, Array | None]
    """The products of x, by name."""
    h: dict[tuple[str, ...], Array]
    """The h of each group of products that a step asks for together."""
    kept: dict[tuple[str, ...], list[Array]]
    """The values of each group, as `Product.kept` makes them."""


def _values(products: dict[str, Product], of_x, names, kept) -> list[Any]:
    """What a step gets of products."""
    return [products[name].value(of_x[name], a) for name, a in zip(names, kept, strict=True)]


def _where(mask, x, y):
    """The state x in the rows of the mask, y in the others; y without a mask."""
    if mask is None:
        return y
    return jax.tree.map(lambda a, b: jnp.where(mask[:, None], a, b), x, y)


def _kinds(state) -> Any:
    return jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", state)


def _merged(names: Sequence[str], group: Sequence[Product]) -> Product:
    """One product that computes those of a group, side by side."""
    if len(group) == 1:
        return group[0]
    forms = {str(jax.tree.map(lambda a: a.shape[:-1], tuple(product))) for product in group}
    if len(forms) > 1 or group[0].kernel.ndim == 3:
        raise ValueError(
            f"step: expected products that are asked for together to agree in which of kernel_x, "
            f"bias and bias_x they have, and to have no kernel in blocks, got {[*names]}"
        )
    group = [Product(*product) for product in group]  # trees of one type
    return jax.tree.map(lambda *a: jnp.concatenate(a, axis=-1), *group)


def _apart(values: Array, widths: Sequence[int]) -> list[Array]:
    """The values of each product."""
    return jnp.split(values, np.cumsum(widths)[:-1], axis=-1)


def _widths(group: Sequence[Product]) -> list[int]:
    return [product.kernel.shape[-1] for product in group]


@partial(_recurrence.defjvp, symbolic_zeros=True)
def _recurrence_jvp(static: _Static, primals, tangents):
    products, x, inputs, params, state, active, reset = primals
    d_products, d_x, d_inputs, d_params, d_state, *_ = tangents
    ys, last, (before, of_x, h, kept) = _forward(static, *primals)
    of_x = {name: a if isinstance(products[name], Pair) else None for name, a in of_x.items()}
    instantiate = partial(jax.tree.map, _dense)

    d_kept, d_of_x, transposable = {}, {}, {}
    for names in kept:
        group = [products[name] for name in names]
        merged = _merged(names, group)
        tangents = _merged_tangents(group, [d_products[name] for name in names])
        d_of_h, of_group = _direct_tangents(group, merged, tangents, x, d_x, h[names])
        by_name = [*zip(names, group, of_group, d_of_h, strict=True)]
        d_kept[names] = [product.kept(a, b) for _, product, a, b in by_name]
        d_of_x |= {name: a if of_x[name] is not None else None for name, _, a, _ in by_name}
        transposable[names] = _transposable(merged.kernel)

    @partial(jax.checkpoint, prevent_cse=False)
    def body(d_state, at_step):
        primals, tangents, active, reset = at_step

        def step(state, kept, of_x, inputs, params):
            def values(names, h):
                names = (*names,)
                widths = tuple(_widths([products[name] for name in names]))
                known = _known(widths, h, transposable[names], kept[names])
                return _values(products, of_x, names, known)

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


def _dense(x, tangent):
    return jnp.zeros_like(x) if isinstance(tangent, SymbolicZero) else tangent


def _merged_tangents(group: Sequence[Product], tangents: Sequence[Product]) -> Product:
    """The tangents of `_merged`."""
    if len(group) == 1:
        return tangents[0]

    def merged(primals, tangents) -> Any:
        if all(map(_is_zero, tangents)):
            return None
        return jnp.concatenate([*map(_dense, primals, tangents)], axis=-1)

    return Product(*map(merged, zip(*group, strict=True), zip(*tangents, strict=True)))


def _direct_tangents(group: Sequence[Product], merged: Product, tangent: Product, x, d_x, h):
    """`h dW + db` of every step, and `dx W_x + x dW_x + db_x`, of each product."""
    widths, of_x = _widths(group), [None] * len(group)
    of_h = _affine_tangent(h, None, merged.kernel, tangent.kernel, tangent.bias)
    if merged.kernel_x is not None:
        kernel_x = merged.kernel_x, tangent.kernel_x, tangent.bias_x
        of_x = _apart(_affine_tangent(x, d_x, *kernel_x), widths)
    return _apart(of_h, widths), of_x


def _affine_tangent(x, d_x, kernel, d_kernel, d_bias):
    dtype = carry_dtype(kernel.dtype)
    out = kernel.shape[-1] * (1 if kernel.ndim == 2 else kernel.shape[0])
    result = jnp.zeros((*x.shape[:-1], out), dtype)
    if not _is_zero(d_x):
        result += affine(d_x, kernel)
    if not _is_zero(d_kernel):
        result += affine(x, d_kernel)
    if not _is_zero(d_bias):
        result += jnp.broadcast_to(d_bias.astype(dtype), result.shape)
    return result


def _is_zero(tangent) -> bool:
    return tangent is None or isinstance(tangent, SymbolicZero)


def _transposable(kernel):
    """The kernel such that the transpose of `_known`'s product is a plain one."""
    return kernel if kernel.ndim == 3 else lax.optimization_barrier(kernel.T)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _known(widths: tuple[int, ...], h, kernel, values):
    """`values`, which are h W plus a rest. Their tangents are given for the rest alone."""
    return values


@_known.defjvp
def _known_jvp(widths, primals, tangents):
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
    return values, [*map(jnp.add, d_values, _apart(of_h, widths))]
