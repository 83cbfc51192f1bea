"""Layers by the compiled CPU kernels of the distribution `twinscan-native`: LSTM, GRU and RNN."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

from jax_models.ops.affine import affine
from jax_models.ops.kernels.native_kernels import (
    GRU,
    Call,
    Kind,
    by_kernel,
    by_xla,
    kind_of,
    loading_error,
    result_shapes,
)
from jax_models.ops.linear_map import linear_map
from jax_models.ops.recurrence import State
from jax_models.ops.rows import Rows
from jax_models.ops.shard_map_axes import match_varying_axes

BATCH_AXES = {
    **dict.fromkeys(("kernel_x", "kernel", "bias", "bias_hn")),
    **dict.fromkeys(("start", "last", "d_last"), 1),
}
"""The batch axes of the kernels' operands and results that are not 0. The weights have none."""

MIN_STEPS = 16
"""The number of steps from which packing the weights pays."""


def native_refusal(
    recurrence: Callable, x: Float[Array, "batch time in"], cells: list[dict[str, Array]]
) -> str | None:
    """Returns why there is no kernel for these arguments, or None if there is one."""
    batch, time, _ = x.shape
    if is_symbolic_dim(batch) or is_symbolic_dim(time):
        return "it takes known sizes, not the symbolic ones of jax.export"
    dtypes = sorted({str(array.dtype) for array in (x, *jax.tree.leaves(cells))})
    device = jax.config.jax_default_device or jax.default_backend()  # pyright: ignore
    platform = getattr(device, "platform", device)
    reasons = {
        "it has the recurrences lstm, gru with reset_after, and rnn": kind_of(recurrence) is None,
        "it has no projection (proj_features)": "kernel_hr" in cells[0],
        "it has no peepholes (use_peepholes)": "peephole" in cells[0],
        f"it computes in float32 or in float64, not in {' and '.join(dtypes)}": (
            dtypes not in (["float32"], ["float64"])
        ),
        f"it runs on a CPU, and JAX's default device is a {platform}": platform != "cpu",
    }
    return next((reason for reason, holds in reasons.items() if holds), loading_error())


def native_pays(x: Float[Array, "batch time in"]) -> bool:
    """Whether the kernels are likely to be faster, if they support the call.

    On two cores with AVX-512, in float32, they took 0.2 to 1.1 of XLA's time for sequences of 16
    steps or more. XLA cannot divide a kernel over devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    by_hand = not mesh.empty and mesh.are_all_axes_manual
    one_device = len(jax.devices("cpu")) == 1 or by_hand
    return x.dtype == jnp.float32 and x.shape[1] >= MIN_STEPS and one_device


def native_layer(
    recurrence: Callable,
    x: Float[Array, "batch time in"],
    state: State,
    cells: list[dict[str, Array]],
    rows: Rows,
) -> tuple[Float[Array, "batch time out"], State]:
    """Runs a layer of one direction or of two, whose outputs are side by side.

    The forward kernel runs all steps of both directions at the same time. The backward kernel runs
    them in the opposite order and computes the gradients of the gates. XLA computes the gradients
    of the weights and of x and, for forward-mode and for second derivatives, everything else.
    Under `vmap`, elements that share their weights become a larger batch, while elements with
    weights of their own run one after the other.

    Args:
        recurrence: `ops.lstm`, `ops.gru` or `ops.rnn`.
        x: the inputs.
        state: the states before the first step. Their first axis runs over the directions.
        cells: the weights of `recurrence` for each direction.
        rows: the lengths and the resets.

    Returns:
        The outputs, zero beyond `lengths`, and the last states.

    """
    kind = kind_of(recurrence)
    assert kind is not None
    y, last = _layer(kind, x, tuple(state), cells, rows)
    return y, kind.state(*last)


@partial(jax.jit, static_argnums=0)  # otherwise each product would be a program of its own
def _layer(kind: Kind, x, state, cells, rows: Rows):
    for index, cell in enumerate(cells):  # raises the operator's errors for wrong weights
        jax.eval_shape(kind.operator, x, kind.state(*(s[index] for s in state)), **cell)
    zeros = jnp.zeros_like(cells[0]["kernel_hh"][0])
    biases = [[cell.get(name, zeros) for name in ("bias_ih", "bias_hh")] for cell in cells]
    kernel_x = jnp.stack([cell["kernel_ih"] for cell in cells])
    kernel = jnp.stack([cell["kernel_hh"] for cell in cells])
    start = tuple(s.astype(kernel.dtype) for s in state)
    arguments = {"x": x, "kernel_x": kernel_x, "kernel": kernel, "start": start}
    if kind == GRU:  # its b_hn is inside the product with the reset gate
        hidden = kernel.shape[1]
        arguments["bias_hn"] = jnp.stack([bias_hh[2 * hidden :] for _, bias_hh in biases])
        biases = [[b_ih, b_hh.at[2 * hidden :].set(0)] for b_ih, b_hh in biases]
    arguments["bias"] = jnp.stack([bias_ih + bias_hh for bias_ih, bias_hh in biases])
    arguments, rows = match_varying_axes((arguments, rows))
    if 0 in x.shape[:2]:  # there is nothing to run
        return by_xla(kind, rows, arguments)
    results = _call(Call(kind, "forward"), {**arguments, "rows": rows})
    return results["y"], results["last"]


native_p = Primitive("native")
native_p.multiple_results = True


def _call(call: Call, operands: dict[str, Any]) -> dict[str, Any]:
    """Calls a kernel, with operands named as in `by_kernel` and results as in `result_shapes`."""
    leaves, tree = jax.tree.flatten(operands)
    results = jax.tree.structure(result_shapes(call, jax.tree.map(jax.typeof, operands)))
    return results.unflatten(native_p.bind(*leaves, call=call, tree=tree))


def _batch_axes(operands: dict[str, Any]) -> list[int | None]:
    paths = jax.tree_util.tree_leaves_with_path(operands)
    return [BATCH_AXES.get(name.key, 0) for (name, *_), _ in paths]


@native_p.def_abstract_eval
def _shapes(*operands, call: Call, tree):
    return jax.tree.leaves(result_shapes(call, tree.unflatten(operands)))


@native_p.def_impl
@partial(jax.jit, static_argnames=("call", "tree"))
def _compiled(*leaves, call: Call, tree):
    return jax.tree.leaves(by_kernel(call, tree.unflatten(leaves)))


def _batch(leaves, axes, *, call: Call, tree):
    """Makes the mapped axis a part of the batch, unless each element has weights of its own."""
    bind = partial(native_p.bind, call=call, tree=tree)
    size = next(x.shape[axis] for x, axis in zip(leaves, axes, strict=True) if axis is not None)
    operands = tree.unflatten(map(jax.typeof, leaves))
    batch_axes = _batch_axes(operands)
    if any(a is not None and b is None for a, b in zip(axes, batch_axes, strict=True)):
        mapped = {i: jnp.moveaxis(leaves[i], a, 0) for i, a in enumerate(axes) if a is not None}

        def run_element(mapped):
            return bind(*(mapped.get(i, leaf) for i, leaf in enumerate(leaves)))

        results = lax.map(run_element, mapped)
        return results, [0] * len(results)

    def merged(x, axis, batch):
        if batch is None:
            return x
        if axis is None:
            x, axis = jnp.broadcast_to(x, (size, *x.shape)), 0
        x = jnp.moveaxis(x, axis, batch)
        return x.reshape(*x.shape[:batch], size * x.shape[batch + 1], *x.shape[batch + 2 :])

    def divided(x, batch):
        return x.reshape(*x.shape[:batch], size, x.shape[batch] // size, *x.shape[batch + 1 :])

    results = bind(*map(merged, leaves, axes, batch_axes))
    result_axes = _batch_axes(result_shapes(call, operands))
    return [*map(divided, results, result_axes)], result_axes


batching.primitive_batchers[native_p] = _batch


def _jvp(primals, tangents, *, call: Call, tree):
    operands = tree.unflatten(primals)
    d_operands = tree.unflatten(map(ad.instantiate_zeros, tangents))
    rows, _ = operands.pop("rows"), d_operands.pop("rows")
    results = _call(call._replace(keep=True), {**operands, "rows": rows})
    residuals = operands, rows, results["y"], results["kept"]
    d_y, d_last = linear_map(_tangent, _gradient, residuals, d_operands, call.kind)
    # Only `_gradient` reads what was kept, and its derivative does not need the tangents.
    d_results = {"y": d_y, "last": d_last, "kept": jax.tree.map(jnp.zeros_like, results["kept"])}
    if not call.keep:
        results["kept"] = d_results["kept"] = ()
    return jax.tree.leaves(results), jax.tree.leaves(d_results)


ad.primitive_jvps[native_p] = _jvp


def _tangent(kind: Kind, residuals, d_operands):
    """The tangents of y and of the last state, by XLA."""
    operands, rows, *_ = residuals
    return jax.jvp(partial(by_xla, kind, rows), (operands,), (d_operands,))[1]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradient(kind: Kind, residuals, gradients):
    """The gradients with respect to the operands, given those of y and of the last state."""
    (operands, rows, y, kept), (d_y, d_last) = residuals, gradients
    kernel, start = operands["kernel"], operands["start"]
    given = {"d_y": d_y, "d_last": d_last, "kernel": kernel, "y": y, "start": start, "kept": kept}
    found = _call(Call(kind, "backward"), {**given, "rows": rows})
    # The gradients of the products of h are those of the gates, except where r multiplies one.
    directions, hidden, _ = kernel.shape
    of_x = of_h = found.pop("gates_x")
    found["bias"] = jnp.stack([gates.sum((0, 1)) for gates in of_x])
    if kind == GRU:
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


def _weight_gradient(x, gradient):
    """The gradient of W, given x and that of x W. XLA is fastest if batch and time are one axis."""
    x, gradient = (a.reshape(-1, a.shape[-1]) for a in (x, gradient))
    return lax.dot_general(x, gradient, (((0,), (0,)), ((), ())))


def _before(y, h0, rows: Rows, *, reverse: bool):
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


@_gradient.defjvp
def _gradient_jvp(kind: Kind, primals, tangents):
    """The second derivative, by XLA, which computes everything again from the operands."""
    (operands, rows, *_), gradients = primals
    (d_operands, *_), d_gradients = tangents

    def gradient(operands, gradients):
        return jax.vjp(partial(by_xla, kind, rows), operands)[1](gradients)[0]

    d_found = jax.jvp(gradient, (operands, gradients), (d_operands, d_gradients))[1]
    return _gradient(kind, *primals), d_found


def _lowered(ctx, *leaves, call: Call, tree):
    # `jax.export` refuses foreign functions, because other processes do not have them.
    exported = ctx.module_context.lowering_parameters.for_export
    exported = exported and call.way == "forward" and not call.keep

    def function(*leaves):
        operands = tree.unflatten(leaves)
        if not exported:
            return jax.tree.leaves(by_kernel(call, operands))
        y, last = by_xla(call.kind, operands.pop("rows"), operands)
        return jax.tree.leaves({"y": y, "last": last})

    return mlir.lower_fun(function, multiple_results=True)(ctx, *leaves)


def _refused(*_, **__):
    raise NotImplementedError("method='native' runs on a CPU only; use method='xla'")


mlir.register_lowering(native_p, _refused)
mlir.register_lowering(native_p, _lowered, platform="cpu")
