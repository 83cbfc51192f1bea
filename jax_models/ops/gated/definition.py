"""Gated recurrences as their equations: the loop over time, and the LSTM, the GRU and the RNN."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_models.checks.arguments import Default, checked
from jax_models.checks.values import as_array, checked_array, described, wrong_shape
from jax_models.ops.affine import affine, common_carry_dtype
from jax_models.ops.forms import Form, Operator
from jax_models.ops.gated import xla
from jax_models.ops.gated.products import (
    Pair,
    Product,
    Recurrence,
    Step,
    known_length,
    merge_products,
    split_values,
    where,
    widths_of,
)
from jax_models.ops.rows import Masks, ScanMasks, given_rows, steps_first
from jax_models.ops.shard_map_axes import match_varying_axes

State = TypeVar("State", bound=tuple)
Nonlinearity = Literal["tanh", "relu"]


@jax.jit  # else eager calls would compile the scan each time
def scan(call: Recurrence):
    """Runs `s_t = step(s_{t−1}, …)` for one t after the other.

    At a `reset`, the state restarts from zero. Steps beyond `lengths` leave it unchanged.
    """
    call = match_varying_axes(call)

    def body(state, at_step):
        of_x, inputs, active, restarts = at_step
        state = where(restarts, jax.tree.map(jnp.zeros_like, state), state)

        def products(names, h):
            group = [call.products[name] for name in names]
            kernel, bias, *_ = merge_products(names, group)
            of_h = split_values(affine(h, kernel, bias), widths_of(group))
            return [
                product.received(of_x[name], product.stored(of_x[name], a))
                for name, product, a in zip(names, group, of_h, strict=True)
            ]

        new = call.step(state, Step(products, inputs, call.params))
        new = new if active is None else where(active, new, state)
        return new, new[0]

    masks = call.rows.active, call.rows.restarts(reverse=call.reverse)
    at_steps = steps_first((call.products_of_x(), call.inputs, *masks))
    length = known_length(call.x.shape[1])
    last, ys = lax.scan(body, call.state, at_steps, length, reverse=call.reverse)
    return jnp.swapaxes(ys, 0, 1), last


RECURRENCE = Operator("recurrence", (Form("xla", xla.run), Form("definition", scan)))


class ScanOptions(ScanMasks, total=False):
    """The keyword arguments of a recurrence besides its inputs and weights."""

    method: Annotated[str, Default("auto")]
    """The form that runs. "definition" is a plain `lax.scan`. "xla", which "auto" chooses, computes
    the gradients of the weights after the loop.
    """


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
    method: str = "auto",
    **masks: Unpack[Masks],
) -> tuple[Float[Array, "batch time out"], State]:
    """Runs `s_t = step(s_{t−1}, …)` for t = 0 … T−1, or for t = T−1 … 0 with `reverse`.

    The backward loop has one matrix product for each product of the forward loop, and the gradient
    of each weight is a single product after the loop. Forward mode and higher derivatives work as
    usual.

    Args:
        step: the equation. Use a function of a module, not a closure made for each call, because
            JAX caches compiled programs by the function.
        state: a NamedTuple of arrays (batch, features), whose first field is the output.
        products: the products that the step asks for, by name.
        x: the inputs that each `kernel_x` multiplies.
        inputs: other arrays (batch, time, …), of which each step receives its own slice.
        params: other arrays, which every step receives whole.
        reverse: run from the last step to the first.
        method: the form that runs, as in `ScanOptions`.
        **masks: `lengths` and `reset`, or `rows`, as in `Masks`. At a `reset`, the state restarts
            from zero.

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
    rows = given_rows(masks)
    call = Recurrence(step, state, products, x, inputs, params, rows, reverse)
    return RECURRENCE(call, method)


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


def sigmoid(x: Array) -> Array:
    """`σ(x)`, computed with tanh because that is faster on a CPU."""
    return 0.5 + 0.5 * jnp.tanh(0.5 * x)


class LSTMState(NamedTuple):
    """The state of an LSTM: the output h, after the projection if there is one, and the cell c."""

    h: Float[Array, "*layers batch out"]
    c: Float[Array, "*layers batch hidden"]


@checked(layers=())
def lstm(
    x: Float[Array, "batch time in"],
    state: LSTMState,
    *,
    kernel_ih: Float[Array, "in 4*hidden"],
    kernel_hh: Float[Array, "out 4*hidden"],
    bias_ih: Float[Array, " 4*hidden"] | None = None,
    bias_hh: Float[Array, " 4*hidden"] | None = None,
    kernel_hr: Float[Array, "hidden out"] | None = None,
    bias_hr: Float[Array, " out"] | None = None,
    peephole: Float[Array, " 3*hidden"] | None = None,
    **options: Unpack[ScanOptions],
) -> tuple[Float[Array, "batch time out"], LSTMState]:
    """Runs an LSTM, with its gates side by side in the order i, f, g, o, as in torch.

        i, f, g, o = x_t W_ih + b_ih + h_{t−1} W_hh + b_hh
        c_t = σ(f) ⊙ c_{t−1} + σ(i) ⊙ tanh(g)
        h_t = σ(o) ⊙ tanh(c_t)

    With a `kernel_hr`, the output is the projection (σ(o) ⊙ tanh(c_t)) W_hr + b_hr instead.

    A `peephole` holds p_i, p_f and p_o side by side. Then p_i ⊙ c_{t−1} is added to i,
    p_f ⊙ c_{t−1} to f, and p_o ⊙ c_t to o.

    `options` are those of `ScanOptions`: `lengths`, `reset`, `rows`, `reverse` and `method`.
    """
    products = Product(kernel_hh, bias_hh, kernel_ih, bias_ih).gates("ifgo")
    if kernel_hr is not None:
        step, products["output"] = _projected_step, Product(kernel_hr, bias_hr)
    elif bias_hr is not None:
        raise ValueError("bias_hr: expected None where there is no kernel_hr, got an array")
    elif kernel_hh.shape[0] != (hidden := state.c.shape[1]):
        raise wrong_shape("kernel_hh", (hidden, 4 * hidden), kernel_hh.shape)
    else:
        step = lstm_step
    return recurrence(step, state, products, x, params=peephole, **options)


def lstm_step(state: LSTMState, now: Step) -> LSTMState:
    i, f, g, o = now.products("ifgo", state.h)
    c = state.c
    if now.params is None:
        c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(g)
        return LSTMState(sigmoid(o) * jnp.tanh(c), c)
    p_i, p_f, p_o = (jnp.broadcast_to(p, c.shape) for p in jnp.split(now.params.astype(c.dtype), 3))
    c = sigmoid(f + p_f * c) * c + sigmoid(i + p_i * c) * jnp.tanh(g)
    return LSTMState(sigmoid(o + p_o * c) * jnp.tanh(c), c)


def _projected_step(state: LSTMState, now: Step) -> LSTMState:
    h, c = lstm_step(state, now)
    return LSTMState(now.product("output", h), c)


class GRUState(NamedTuple):
    """The state of a GRU: the hidden state h."""

    h: Float[Array, "*layers batch hidden"]


@checked(layers=())
def gru(
    x: Float[Array, "batch time in"],
    state: GRUState,
    *,
    kernel_ih: Float[Array, "in 3*hidden"],
    kernel_hh: Float[Array, "hidden 3*hidden"],
    bias_ih: Float[Array, " 3*hidden"] | None = None,
    bias_hh: Float[Array, " 3*hidden"] | None = None,
    reset_after: bool = True,
    **options: Unpack[ScanOptions],
) -> tuple[Float[Array, "batch time hidden"], GRUState]:
    """Runs a GRU over a sequence, with its gates side by side in the order r, z, n, as in torch.

        r = σ(x_t W_ir + b_ir + h_{t−1} W_hr + b_hr)
        z = σ(x_t W_iz + b_iz + h_{t−1} W_hz + b_hz)
        n = tanh(x_t W_in + b_in + r ⊙ (h_{t−1} W_hn + b_hn))
        h_t = (1 − z) ⊙ n + z ⊙ h_{t−1}

    Because r multiplies b_hn, the two biases of n cannot be merged. Without `reset_after`, r
    multiplies h_{t−1} before the product with W_hn, as in the paper:

        n = tanh(x_t W_in + b_in + (r ⊙ h_{t−1}) W_hn + b_hn)

    `options` are those of `ScanOptions`: `lengths`, `reset`, `rows`, `reverse` and `method`.
    """
    products = Product(kernel_hh, bias_hh, kernel_ih, bias_ih).gates("rzn")
    if not reset_after:
        step = _step_reset_before
    else:
        step, products["n"] = gru_step, Pair(*products["n"])
    return recurrence(step, state, products, x, **options)


def gru_step(state: GRUState, now: Step) -> GRUState:
    [h] = state
    r, z, (n_x, n_h) = now.products("rzn", h)
    r, z = sigmoid(r), sigmoid(z)
    n = jnp.tanh(n_x + r * n_h)
    return GRUState((1 - z) * n + z * h)


def _step_reset_before(state: GRUState, now: Step) -> GRUState:
    [h] = state
    r, z = map(sigmoid, now.products("rz", h))
    n = jnp.tanh(now.product("n", r * h))
    return GRUState((1 - z) * n + z * h)


class RNNState(NamedTuple):
    """The state of an RNN: the hidden state h."""

    h: Float[Array, "*layers batch hidden"]


@checked(layers=())
def rnn(
    x: Float[Array, "batch time in"],
    state: RNNState,
    *,
    kernel_ih: Float[Array, "in hidden"],
    kernel_hh: Float[Array, "hidden hidden"],
    bias_ih: Float[Array, " hidden"] | None = None,
    bias_hh: Float[Array, " hidden"] | None = None,
    nonlinearity: Nonlinearity = "tanh",
    **options: Unpack[ScanOptions],
) -> tuple[Float[Array, "batch time hidden"], RNNState]:
    """`h_t = φ(x_t W_ih + b_ih + h_{t−1} W_hh + b_hh)`, φ = tanh or relu.

    `options` are those of `ScanOptions`: `lengths`, `reset`, `rows`, `reverse` and `method`.
    """
    products = {"h": Product(kernel_hh, bias_hh, kernel_ih, bias_ih)}
    return recurrence(RNN_STEPS[nonlinearity], state, products, x, **options)


def _tanh_step(state: RNNState, now: Step) -> RNNState:
    return RNNState(jnp.tanh(now.product("h", state.h)))


def _relu_step(state: RNNState, now: Step) -> RNNState:
    return RNNState(jax.nn.relu(now.product("h", state.h)))


RNN_STEPS = {"tanh": _tanh_step, "relu": _relu_step}
