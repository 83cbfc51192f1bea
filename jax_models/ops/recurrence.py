"""A nonlinear recurrence over a sequence, whose weights' gradients are taken after its loop."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import default_backend, lax
from jax.custom_derivatives import SymbolicZero
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int

from jax_models.ops.affine import affine, carry_dtype, common_carry_dtype
from jax_models.ops.checks import as_array, checked, checked_array, described, wrong_shape
from jax_models.ops.segments import segments
from jax_models.ops.varying import alike

State = TypeVar("State", bound=tuple)
RecurrenceMethod = Literal["auto", "hoisted", "joined"]
FEW_STEPS = 4
"""They do not pay back the copies that "joined" makes of the kernels."""
LANES, MANY_ROWS = 8, 64
"""The rows of "joined" go by vectors of 8 on a CPU. Of many the ragged end costs little."""
LARGE_KERNEL = 2**18
"""Elements. With a smaller kernel "joined" does not pay."""


class Product(NamedTuple):
    """`h ↦ h W + b`, to which `x_t W_x + b_x` is added if there is a kernel for it."""

    kernel: Float[Array, "*blocks in out"]
    bias: Float[Array, " blocks*out"] | None = None
    kernel_x: Float[Array, "in_x out_x"] | None = None
    bias_x: Float[Array, " out_x"] | None = None

    def join(self, of_x: Array, of_h: Array) -> Any:
        """What a step gets of the two products."""
        return of_x + of_h


class Pair(Product):
    """A product of x and one of h; a step gets both."""

    def join(self, of_x: Array, of_h: Array) -> Any:
        """The two, as they are."""
        return of_x, of_h


class Step(NamedTuple):
    """What a step has besides the state. Features are on `axis`, the batch is on the other."""

    product: Callable[[str, Array], Any]
    """`product(name, h)`, once a name: one of the recurrence's products, or both of a `Pair`."""
    axis: int
    inputs: Any
    params: Any

    def split(self, x: Array, count: int) -> list[Array]:
        """Equal parts of the features."""
        return jnp.split(x, count, self.axis)


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
    method: RecurrenceMethod = "auto",
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
        method: "hoisted", the products of x before the loop, arrays (batch, features) in it;
            "joined", the products of x in the loop, too, arrays (features, batch): x and h side by
            side make one product, but for a `Pair`; under differentiation the loop is hoisted,
            whose backward pass is faster;
            "auto", joined where `jax.default_backend()` is a CPU, a product makes several gates,
            its kernel is large, and the rows fill its vectors, unless there are few steps.

    Returns:
        The outputs of every step (those beyond `lengths` carry no meaning), and the last state.

    Raises:
        TypeError: the state, the inputs or the parameters are not arrays.
        ValueError: a shape is wrong, there is no product or no such method, "joined" has a kernel
            in blocks, a `bias_x` has no kernel_x, or the step does not ask for each product once,
            or returns another state.

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
    in_blocks = any(kernel.ndim == 3 for kernel in kernels)
    if method == "joined" and in_blocks:
        raise ValueError('method: "joined" takes no kernel in blocks, "hoisted" does')
    for name, product in products.items():
        if product.kernel_x is None and product.bias_x is not None:
            raise ValueError(f"products[{name!r}].bias_x: expected None without kernel_x, got one")
        if product.kernel_x is not None and product.kernel_x.shape[0] != features:
            expected = (features, product.kernel_x.shape[1])
            raise wrong_shape(f"products[{name!r}].kernel_x", expected, product.kernel_x.shape)
    joined = method == "joined"
    known = not any(map(is_symbolic_dim, x.shape))
    on_cpu = default_backend() == "cpu"
    if method == "auto" and on_cpu and not in_blocks and known and time > FEW_STEPS:
        filling = batch % LANES == 0 or batch > MANY_ROWS
        joined = filling and any(
            k.size >= LARGE_KERNEL and k.shape[1] > k.shape[0] for k in kernels
        )
    if time == 0:
        return jnp.zeros((batch, 0, state[0].shape[1]), state[0].dtype), state
    static = _Static(step, joined, reverse)
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
    joined: bool
    reverse: bool

    @property
    def axis(self) -> int:
        """The axis of the features."""
        return 0 if self.joined else 1

    def turned(self, x: Array) -> Array:
        """(…, batch, features) as the loop has it, and back."""
        return jnp.swapaxes(x, -1, -2) if self.joined else x

    def where(self, mask, x, y):
        """The state x in the rows of the mask, y in the others; y without a mask."""
        if mask is None:
            return y
        mask = jnp.expand_dims(mask, self.axis)
        return jax.tree.map(lambda a, b: jnp.where(mask, a, b), x, y)

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
    """The outputs, the last state, the states before each step, and the products' h and values."""
    axis = static.axis
    before_loop, in_loop = {}, {}
    for name, product in products.items():
        before_loop[name], in_loop[name] = _prepared(static, product, x)

    def body(state, at_step):
        inputs, of_x, active, reset = at_step
        state = static.where(reset, jax.tree.map(jnp.zeros_like, state), state)
        found = {}

        def product(name, h):
            if name in found or name not in products:
                raise ValueError(
                    f"step: expected each of the products {[*products]} once, it asked for "
                    f"{[*found, name]}"
                )
            found[name] = h, in_loop[name](of_x[name], h)
            return found[name][1]

        new = static.step(state, Step(product, axis, inputs, params))
        if _kinds(new) != _kinds(state):
            raise ValueError(f"step: expected to return {_kinds(state)}, it returned {_kinds(new)}")
        if found.keys() != products.keys():
            raise ValueError(f"step: expected products {[*products]}, it asked for {[*found]}")
        new = new if active is None else static.where(active, new, state)
        return new, (new[0], state, found)

    state = jax.tree.map(static.turned, state)
    at_steps = (inputs, before_loop, active, reset)
    last, (ys, before, found) = static.scan(body, state, at_steps, x.shape[0])
    return static.turned(ys), jax.tree.map(static.turned, last), before, found


def _kinds(state) -> Any:
    return jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", state)


def _prepared(static: _Static, product: Product, x):
    """What of a product is made before the loop, and the function `(that at a step, h) ↦ z`."""
    kernel, bias, kernel_x, bias_x = product
    of_h = _apply(static, kernel, bias)
    if kernel_x is None:
        return None, lambda _, h: of_h(h)
    if not static.joined:
        return affine(x, kernel_x, bias_x), lambda of_x, h: product.join(of_x, of_h(h))
    x = static.turned(x.astype(kernel_x.dtype))
    if isinstance(product, Pair):
        of_x = _apply(static, kernel_x, bias_x)
        return x, lambda x, h: product.join(of_x(x), of_h(h))
    accumulator = carry_dtype(kernel.dtype)
    biases = [b.astype(accumulator) for b in (bias, bias_x) if b is not None]
    both = _apply(static, jnp.concatenate([kernel_x, kernel]), sum(biases) if biases else None)
    return x, lambda x, h: both(jnp.concatenate([x, h.astype(x.dtype)]))


def _apply(static: _Static, kernel, bias):
    """`h ↦ h W + b` as the loop has them."""
    if not static.joined:
        return lambda h: affine(h, kernel, bias)
    kernel = lax.optimization_barrier(kernel.T)
    accumulator = carry_dtype(kernel.dtype)

    def apply(h):
        z = jnp.matmul(kernel, h.astype(kernel.dtype), preferred_element_type=accumulator)
        return z if bias is None else z + bias.astype(accumulator)[:, None]

    return apply


@partial(_recurrence.defjvp, symbolic_zeros=True)
def _recurrence_jvp(static: _Static, primals, tangents):
    static = static._replace(joined=False)
    products, x, inputs, params, state, active, reset = primals
    d_products, d_x, d_inputs, d_params, d_state, *_ = tangents
    ys, last, before, found = _forward(static, *primals)
    instantiate = partial(jax.tree.map, _dense)

    direct, transposable = {}, {}
    for name, product in products.items():
        h, _ = found[name]
        direct[name] = _direct_tangent(product, d_products[name], x, d_x, h)
        transposable[name] = _transposable(product.kernel)

    @partial(jax.checkpoint, prevent_cse=False)
    def body(d_state, at_step):
        before, found, inputs, d_inputs, direct, active, reset = at_step

        def step(state, values, inputs, params):
            def product(name, h):
                kernel, value = transposable[name], values[name]
                if isinstance(products[name], Pair):
                    return value[0], _known(h, kernel, value[1])
                return _known(h, kernel, value)

            return static.step(state, Step(product, static.axis, inputs, params))

        d_state = static.where(reset, jax.tree.map(jnp.zeros_like, d_state), d_state)
        values = {name: value for name, (_, value) in found.items()}
        _, d_new = jax.jvp(
            step, (before, values, inputs, params), (d_state, direct, d_inputs, dense_params)
        )
        d_new = d_new if active is None else static.where(active, d_new, d_state)
        return d_new, d_new[0]

    dense_params = instantiate(params, d_params)
    at_steps = (before, found, inputs, instantiate(inputs, d_inputs), direct, active, reset)
    d_last, d_ys = static.scan(body, instantiate(state, d_state), at_steps, x.shape[0])
    return (ys, last), (d_ys, d_last)


def _dense(x, tangent):
    return jnp.zeros_like(x) if isinstance(tangent, SymbolicZero) else tangent


def _direct_tangent(product: Product, tangent: Product, x, d_x, h):
    """`dx W_x + x dW_x + db_x` of every step, joined to its `h dW + db`."""
    of_h = _affine_tangent(h, None, product.kernel, tangent.kernel, tangent.bias)
    if product.kernel_x is None:
        return of_h
    of_x = _affine_tangent(x, d_x, product.kernel_x, tangent.kernel_x, tangent.bias_x)
    return product.join(of_x, of_h)


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


@jax.custom_jvp
def _known(h, kernel, value):
    """`value`, which is h W plus a rest. Its tangent is given for the rest alone."""
    return value


@_known.defjvp
def _known_jvp(primals, tangents):
    _, kernel, value = primals
    d_h, _, d_value = tangents
    if kernel.ndim == 3:
        of_h = affine(d_h, kernel)
    else:
        contract = (((1,), (1,)), ((), ()))
        d_h = d_h.astype(kernel.dtype)
        of_h = lax.dot_general(d_h, kernel, contract, preferred_element_type=value.dtype)
    return value, d_value + of_h
