"""A recurrence of products of small matrices, run as a single kernel."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
from jaxtyping import Array, Float

from jax_models.ops.kernels import matrix_scan_tpu
from jax_models.ops.kernels.device_scan import DeviceScan
from jax_models.ops.linear_map import linear_map

State = Float[Array, "... height width"]
Sequences = Sequence[Float[Array, "time ... height width"]]
MatrixStep = Callable[..., tuple[State, tuple[Array, ...]]]
"""`step(state, *xs)` runs a step on the matrices of some rows: it returns the state and outputs."""


def matrix_scan(
    step: MatrixStep, start: State, xs: Sequences, *, interpret: bool = False
) -> tuple[Sequences, State]:
    """Runs `state, ys_t = step(state, *xs_t)` for t = 0 … T−1.

    A kernel for TPUs runs over time once, with the state in on-chip memory (`matrix_scan_tpu`). It
    was compiled for TPUs and runs in an interpreter, but has not run on a TPU yet. There is no
    kernel for GPUs, because a Triton kernel took 8 to 26 times as long as the chunked method on an
    H100. Tangents and gradients are matrix scans of the step's derivatives. For these, the state
    before each step is stored.

    Args:
        step: the step, written with jnp. Pass the same function at each call, because compiled
            programs are cached by it.
        start: the state before the first step.
        xs: the inputs, in the dtype of the state. Between time and the matrices, they have the same
            axes as the state.
        interpret: whether to run the TPU's kernel in Pallas's interpreter, on any device.

    Raises:
        NotImplementedError: a second derivative is taken. Also when the program is lowered, if
            there is no kernel for the device or dtype, or if XLA rather than `shard_map` divides
            the program over several TPU chips.

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
    """Returns a step that also outputs the state before it."""

    def keeping(state, *xs):
        after, ys = step(state, *xs)
        return after, (state, *ys)

    return keeping


def _tangents(interpret: bool, step: MatrixStep, residuals, tangents):
    """Runs the scan of the step's tangents."""
    before, xs = residuals
    start, tangents = tangents
    return _run(interpret, _tangent(step), start, [before, *xs, *tangents])


def _gradients(interpret: bool, step: MatrixStep, residuals, gradients):
    """Runs the scan of the step's gradients, from the last step to the first."""
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
    alternative="chunked",
)
