"""The form "native" of `ops.recurrent_stack`."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_models import ops
from jax_models.ops.affine import affine
from jax_models.ops.forms import runs_on_one_device
from jax_models.ops.gated.stack import Stack, run_layer
from jax_models.ops.shard_map_axes import match_varying_axes
from twinscan_native.kernels import GRU, LSTM, RELU, RNN, Kernel, Kind, refusal_of

MIN_STEPS = 16
"""The number of steps from which packing the weights pays."""


def refusal(call: Stack) -> str | None:
    """Returns why there is no kernel for the call, or None if there is one."""
    reasons = {
        "it supports lstm, rnn, and gru with reset_after=True": kind_of(call) is None,
        "it does not support projections (proj_features)": "kernel_hr" in call.cells[0],
        "it does not support peepholes (use_peepholes)": "peephole" in call.cells[0],
    }
    arrays = call.x, *jax.tree.leaves(call.cells)
    return next((reason for reason, holds in reasons.items() if holds), refusal_of(call, *arrays))


def pays(call: Stack, platform: str, differentiated: bool) -> bool:
    """Whether the kernels are likely to be faster than XLA.

    On two cores with AVX-512, in float32, they took 0.2 to 1.1 of XLA's time for sequences of 16
    steps or more.
    """
    is_long = call.x.shape[1] >= MIN_STEPS
    return call.x.dtype == jnp.float32 and is_long and runs_on_one_device("cpu")


def run(call: Stack):
    """Runs a stack by the kernels.

    The forward kernel runs all steps of a layer, in both directions at the same time. The backward
    kernel runs them in the opposite order and computes the gradients of the gates. XLA computes the
    gradients of the weights and of x from these. Under `vmap`, elements that share their weights
    become a larger batch, while elements with weights of their own run one after the other.
    """
    return call.by_layer(_run_layer)


def kind_of(call: Stack) -> Kind | None:
    """Returns the kernels for the recurrence of a stack, or None."""
    options = dict(call.options)
    if call.recurrence is ops.gru and options.get("reset_after", True):
        return GRU
    if call.recurrence is ops.rnn:
        return RELU if options.get("nonlinearity") == "relu" else RNN
    return LSTM if call.recurrence is ops.lstm else None


class Static(NamedTuple):
    """The static arguments of a layer."""

    kind: Kind
    recurrence: Callable[..., Any]
    options: tuple[tuple[str, Any], ...]


@jax.jit  # otherwise each product would be a program of its own
def _run_layer(layer: Stack):
    kind, state = kind_of(layer), layer.state
    assert kind is not None
    recurrence = partial(layer.recurrence, **dict(layer.options))
    for index, cell in enumerate(layer.cells):  # raises the operator's errors for wrong weights
        start = jax.tree.map(lambda s: s[index], state)  # noqa: B023
        jax.eval_shape(recurrence, layer.x[:, :0], start, **cell)
    # The kernels add up the biases, except for b_hn, which is in the product with the reset gate.
    zeros = jnp.zeros_like(layer.cells[0]["kernel_hh"][0])
    biases = [[cell.get(name, zeros) for name in ("bias_ih", "bias_hh")] for cell in layer.cells]
    kernel = jnp.stack([cell["kernel_hh"] for cell in layer.cells])
    operands = {
        "x": layer.x,
        "kernel_x": jnp.stack([cell["kernel_ih"] for cell in layer.cells]),
        "kernel": kernel,
        "start": jax.tree.map(lambda s: s.astype(kernel.dtype), state),
    }
    if kind == GRU:
        hidden = kernel.shape[1]
        operands["bias_hn"] = jnp.stack([bias_hh[2 * hidden :] for _, bias_hh in biases])
        biases = [[b_ih, b_hh.at[2 * hidden :].set(0)] for b_ih, b_hh in biases]
    operands["bias"] = jnp.stack([bias_ih + bias_hh for bias_ih, bias_hh in biases])
    operands, rows = match_varying_axes((operands, layer.rows))
    static = Static(kind, layer.recurrence, layer.options)
    if 0 in layer.x.shape[:2]:  # there is nothing to run
        return _by_xla(static, operands, rows)
    return _layer(static, operands, rows)


def _by_xla(static: Static, operands, rows):
    """Computes the results from the operands of the kernels, but without a kernel."""
    kernel, cells = operands["kernel"], []
    for index, (kernel_x, bias) in enumerate(
        zip(operands["kernel_x"], operands["bias"], strict=True)
    ):
        cell = {"kernel_ih": kernel_x, "kernel_hh": kernel[index], "bias_ih": bias}
        if static.kind == GRU:
            bias_hn = operands["bias_hn"][index]
            cell["bias_hh"] = jnp.pad(bias_hn, (2 * kernel.shape[1], 0))
        cells.append(cell)
    arrays = operands["x"], operands["start"], cells, rows
    y, last = run_layer(Stack(static.recurrence, static.options, *arrays, len(cells)))
    return rows.masked(y), last


def _forward(static: Static, keep: bool, operands, rows):
    found = Kernel(static.kind, "forward", keep)({**operands, "rows": rows})
    return (found["y"], found["last"]), found["kept"]


def _gradient(static: Static, operands, rows, results, kept, gradients):
    """Returns the gradients with respect to the operands."""
    (y, _), (d_y, d_last) = results, gradients
    kernel, start = operands["kernel"], operands["start"]
    given = {"d_y": d_y, "d_last": d_last, "kernel": kernel, "y": y, "start": start, "kept": kept}
    found = Kernel(static.kind, "backward")({**given, "rows": rows})
    # The gradients of the products of h are those of the gates, except where r multiplies one.
    directions, hidden, _ = kernel.shape
    of_x = of_h = found.pop("gates_x")
    found["bias"] = jnp.stack([gates.sum((0, 1)) for gates in of_x])
    if static.kind == GRU:
        n_h = found.pop("n_h")
        found["bias_hn"] = jnp.stack([n.sum((0, 1)) for n in n_h])
        pairs = zip(of_x, n_h, strict=True)
        of_h = [jnp.concatenate([rzn[..., : 2 * hidden], n], axis=-1) for rzn, n in pairs]
    outputs = jnp.split(y, directions, axis=-1)
    h = [_before(y_d, start[0][d], rows, reverse=d == 1) for d, y_d in enumerate(outputs)]
    found["kernel"] = jnp.stack([*map(_weight_gradient, h, of_h)])
    found["kernel_x"] = jnp.stack([_weight_gradient(operands["x"], gates) for gates in of_x])
    pairs = zip(of_x, operands["kernel_x"], strict=True)
    found["x"] = sum(affine(gates, kernel_x.T) for gates, kernel_x in pairs)
    return found


_layer = ops.LibraryFunction(_by_xla, _forward, _gradient)


def _weight_gradient(x, gradient):
    """The gradient of W, given x and that of x W. XLA is fastest if batch and time are one axis."""
    x, gradient = (a.reshape(-1, a.shape[-1]) for a in (x, gradient))
    return lax.dot_general(x, gradient, (((0,), (0,)), ((), ())))


def _before(y, h0, rows: ops.Rows, *, reverse: bool):
    """The h that each step of a direction reads."""
    if reverse:
        h = jnp.concatenate([y[:, 1:], h0[:, None]], axis=1)
        if rows.lengths is not None:
            ends = jnp.arange(1, 1 + y.shape[1], dtype=rows.lengths.dtype)
            at_end = ends[None, :] == rows.lengths[:, None]
            h = jnp.where(at_end[..., None], h0[:, None], h)
    else:
        h = jnp.concatenate([h0[:, None], y[:, :-1]], axis=1)
    restarts = rows.restarts(reverse=reverse)
    return h if restarts is None else jnp.where(restarts[..., None], jnp.zeros_like(h), h)


FORM = ops.Form("native", run, ("cpu",), refusal, pays)
