"""A recurrence of products of small matrices as one kernel of the device."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, Protocol

import jax
from jaxtyping import Array, Float

from jax_models.ops.kernels import matrix_scan_tpu
from jax_models.ops.kernels.device_scan import DeviceScan
from jax_models.ops.linear_map import linear_map

State = Float[Array, "... height width"]
Sequences = Sequence[Float[Array, "time ... height width"]]


class MatrixStep(Protocol):
    """One step: the state after it, and the outputs, of one row's matrices or of several rows'."""

    def __call__(self, state: State, /, *xs: Array) -> tuple[State, tuple[Array, ...]]: ...


def matrix_scan(
    step: MatrixStep, start: State, xs: Sequences, *, interpret: bool = False
) -> tuple[Sequences, State]:
    """`state, ys_t = step(state, *xs_t)` for t = 0 … T−1: all outputs, the last state.

    A kernel for TPUs goes through time once, with the state on the chip (`matrix_scan_tpu`). It was
    compiled for TPUs and runs in an interpreter, but has not run on a TPU yet. There is no kernel
    for GPUs, because one by Triton took 8 to 26 times as long as the chunked form on an H100.
    Tangents and gradients are matrix scans of the step's derivatives, for which the state before
    each step is kept.

    Args:
        step: in jnp, the same function at each call: programs are kept by it.
        start: the state before the first step.
        xs: the inputs, in the state's dtype and with its axes between time and the matrices.
        interpret: run the TPU's kernel in Pallas's interpreter, wherever it is.

    Raises:
        NotImplementedError: there is no kernel for the device, the dtype, or where XLA divides a
            TPU's program over chips by itself, not by `shard_map`; when the program is lowered.
            Or a second derivative is taken.

    """
    axes = start.shape[:-2]

    def rows(x, at):
        return x.reshape(*x.shape[:at], -1, *x.shape[-2:])

    ys, last = _scan(interpret, step, rows(start, 0), [rows(x, 1) for x in xs])
    return [y.reshape(y.shape[0], *axes, *y.shape[-2:]) for y in ys], last.reshape(start.shape)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _scan(interpret: bool, step: MatrixStep, start, xs):
    return _run(interpret, step, start, xs)


@_scan.defjvp
def _scan_jvp(interpret: bool, step: MatrixStep, primals, tangents):
    start, xs = primals
    (before, *ys), last = _run(interpret, _and_before(step), start, xs)
    return (ys, last), linear_map(_tangents, _gradients, (before, xs), tangents, interpret, step)


@cache
def _and_before(step: MatrixStep) -> MatrixStep:
    """The step that puts out the state before it, too."""

    def keeping(state, *xs):
        after, ys = step(state, *xs)
        return after, (state, *ys)

    return keeping


def _tangents(interpret: bool, step: MatrixStep, residuals, tangents):
    """The scan of the step's tangents."""
    before, xs = residuals
    start, tangents = tangents
    return _run(interpret, _tangent(step), start, [before, *xs, *tangents])


def _gradients(interpret: bool, step: MatrixStep, residuals, gradients):
    """The scan of the step's gradients, from the last to the first."""
    before, xs = residuals
    ys, last = gradients
    inputs = [before, *xs, *ys]
    xs, start = _run(interpret, _gradient(step, len(xs)), last, inputs, reverse=True)
    return start, xs


@cache
def _tangent(step: MatrixStep) -> MatrixStep:
    def moved(tangent, before, *xs_and_tangents):
        half = len(xs_and_tangents) // 2
        xs, tangents = xs_and_tangents[:half], xs_and_tangents[half:]
        return jax.jvp(step, (before, *xs), (tangent, *tangents))[1]

    return moved


@cache
def _gradient(step: MatrixStep, inputs: int) -> MatrixStep:
    def pulled_back(gradient, before, *xs_and_gradients):
        xs, gradients = xs_and_gradients[:inputs], xs_and_gradients[inputs:]
        _, pullback = jax.vjp(step, before, *xs)
        before, *xs = pullback((gradient, gradients))
        return before, tuple(xs)

    return pulled_back


def _run(interpret: bool, step: MatrixStep, start, xs, *, reverse: bool = False):
    _, ys = jax.eval_shape(step, start, *(x[0] for x in xs))
    options: dict[str, Any] = {"outputs": len(ys), "reverse": reverse, "interpret": interpret}
    ys, (last,) = by_kernel(step, [start], xs, fallback=None, **options)
    return ys, last


def _shapes(step: MatrixStep, start, xs, _):
    (state,), time = start, xs[0].shape[0]
    _, ys = jax.eval_shape(step, state, *(x.update(shape=x.shape[1:]) for x in xs))
    return [state.update(shape=(time, *y.shape)) for y in ys] + [state]


by_kernel = DeviceScan(
    "matrix_scan",
    tpu=matrix_scan_tpu.matrix_scan,
    shapes=_shapes,
    axis_of_rows=lambda x: x.ndim - 3,
    instead="chunked",
)
