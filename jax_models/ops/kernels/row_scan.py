"""A recurrence of elementwise steps as one kernel of the device, which reads every input once."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.export import is_symbolic_dim
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

from jax_models.ops.kernels import row_scan_gpu, row_scan_tpu

Rows = Sequence[Float[Array, "batch features"]]
Sequences = Sequence[Float[Array, "batch time features"]]


class RowStep(Protocol):
    """One step of every row: the state after it, and the outputs."""

    def __call__(self, state: Rows, *xs: Array) -> tuple[Rows, Rows]: ...


def row_scan(
    step: RowStep,
    start: Rows,
    xs: Sequences,
    *,
    outputs: int,
    reverse: bool = False,
    interpret: bool = False,
    fallback: Callable[[Rows, Sequences], tuple[Sequences, Rows]] | None = None,
) -> tuple[Sequences, Rows]:
    """`state, ys_t = step(state, *xs_t)` for t = 0 … T−1, or T−1 … 0 with `reverse`.

    A kernel goes through time once, the state in its registers: Mosaic's on a TPU
    (`row_scan_tpu`), Triton's on an NVIDIA GPU (`row_scan_gpu`). Both were compiled for their
    devices and run in an interpreter; neither has run on a device yet. Which it is, or whether
    there is one, is known where the program is lowered. Under `vmap` the rows become more; the
    derivative is the fallback's.

    Args:
        step: elementwise in jnp, the same function at each call: programs are kept by it.
        start: the state before the first step, of the accumulation's dtype.
        xs: the inputs, in any floating dtype; `step` gets them in the state's dtype.
        outputs: how many arrays a step puts out.
        reverse: run from the last step to the first.
        interpret: run the TPU's kernel in Pallas's interpreter, wherever it is.
        fallback: `fallback(start, xs)` does the same where there is no kernel for it: in float64 on
            a TPU, or where XLA divides a TPU's program over chips by itself, not by `shard_map`.

    Returns:
        The outputs of all steps, and the last state, in the dtype of the state.

    Raises:
        NotImplementedError: there is no kernel and no fallback; when the program is lowered.

    """
    options = {"step": step, "states": len(start), "outputs": outputs, "reverse": reverse}
    if interpret:
        results = _interpreted(**options)(*start, *xs)
    else:
        results = row_scan_p.bind(*start, *xs, fallback=fallback, **options)
    return results[:outputs], results[outputs:]


row_scan_p = Primitive("row_scan")
row_scan_p.multiple_results = True


@row_scan_p.def_impl
@partial(jax.jit, static_argnames=("step", "states", "outputs", "reverse", "fallback"))
def _compiled(*args, **params):
    return row_scan_p.bind(*args, **params)


@row_scan_p.def_abstract_eval
def _shapes(*args, states: int, outputs: int, **_):
    start, first = args[:states], args[states]
    return [first.update(dtype=start[0].dtype)] * outputs + [*start]


def _flat(scan: Callable[..., Any], states: int):
    """The scan as the primitive has it: states and inputs, outputs and states in a row."""

    def flat(*args):
        ys, last = scan(args[:states], args[states:])
        return [*ys, *last]

    return flat


def _by(kernel: Callable[..., Any]):
    """How to lower to a kernel, or to the fallback where the kernel says no."""

    def rule(ctx, *args, step, states, outputs, reverse, fallback):
        def lower(scan):
            return mlir.lower_fun(_flat(scan, states), multiple_results=True)(ctx, *args)

        try:
            if any(is_symbolic_dim(size) for x in ctx.avals_in for size in x.shape):
                raise NotImplementedError("a program for any size can have no kernel")
            return lower(partial(kernel, step, outputs=outputs, reverse=reverse))
        except NotImplementedError as error:
            if fallback is None:
                raise NotImplementedError(
                    f'method: "pallas" cannot serve here, "associative" can: {error}'
                ) from error
            return lower(fallback)

    return rule


def _no_kernel(*_, **__):
    raise NotImplementedError("it has kernels for TPUs and NVIDIA GPUs only")


def _tpu_kernel(step, start, xs, **options):
    """Mosaic takes no 64-bit integers, nor does the kernel take 64-bit floats."""
    with jax.enable_x64(False):
        return row_scan_tpu.row_scan(step, start, xs, **options)


def _interpreted(*, step, states: int, **options):
    """The TPU's kernel in Pallas's interpreter, which is no part of a primitive's lowering."""
    kernel = partial(row_scan_tpu.row_scan, step, interpret=True, **options)
    scan = custom_vmap(_flat(kernel, states))

    @scan.def_vmap
    def _(size, batched, *args):
        results = _rows_of_one(scan, size, args, [0 if each else None for each in batched])
        return results, [True] * len(results)

    return scan


def _rows_of_one(scan, size: int, args, axes):
    """A batch of scans as one of more rows."""

    def merged(x, axis):
        first = jnp.moveaxis(x, axis, 0) if axis is not None else x[None]
        return jnp.broadcast_to(first, (size, *first.shape[1:])).reshape(-1, *first.shape[2:])

    return [x.reshape(size, -1, *x.shape[1:]) for x in scan(*map(merged, args, axes))]


def _batched(args, axes, **params):
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    results = _rows_of_one(partial(row_scan_p.bind, **params), size, args, axes)
    return results, [0] * len(results)


batching.primitive_batchers[row_scan_p] = _batched


def _jvp(primals, tangents, *, states: int, fallback, **params):
    if fallback is None:
        raise NotImplementedError(
            'method: "pallas" has first derivatives only, "auto" and "associative" have all'
        )

    results = row_scan_p.bind(*primals, states=states, fallback=fallback, **params)
    tangents = tuple(map(ad.instantiate_zeros, tangents))
    return results, jax.jvp(_flat(fallback, states), primals, tangents)[1]


ad.primitive_jvps[row_scan_p] = _jvp
mlir.register_lowering(row_scan_p, _by(_no_kernel))
mlir.register_lowering(row_scan_p, _by(_tpu_kernel), platform="tpu")
mlir.register_lowering(row_scan_p, _by(row_scan_gpu.row_scan), platform="cuda")

KERNELS: dict[str, Callable[..., tuple[Sequences, Rows]]] = {
    "pallas": row_scan,
    "pallas_interpreted": partial(row_scan, interpret=True),
}
"""The methods that an operator runs by `row_scan`: on the device, or as if on a TPU."""
