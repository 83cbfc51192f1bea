"""A recurrence of elementwise steps as one kernel of the device, which reads every input once."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array, Float

from jax_models.ops import row_scan_gpu, row_scan_tpu

Rows = Sequence[Float[Array, "batch features"]]
Sequences = Sequence[Float[Array, "batch time features"]]


class Step(Protocol):
    """One step of every row: the state after it, and the outputs."""

    def __call__(self, state: Rows, *xs: Array) -> tuple[Rows, Rows]: ...


def row_scan(
    step: Step,
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
    there is one, is known where the program is lowered. Under `vmap` the rows become more; there
    is no derivative.

    Args:
        step: elementwise in jnp, the same function at each call: programs are kept by it.
        start: the state before the first step, of the accumulation's dtype.
        xs: the inputs, of any floating dtype; `step` gets them in that of the state.
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
    options = {"outputs": outputs, "reverse": reverse}

    @custom_vmap
    def scan(start, xs):
        if interpret:
            return row_scan_tpu.row_scan(step, start, xs, interpret=True, **options)
        results = row_scan_p.bind(
            *start, *xs, step=step, states=len(start), fallback=fallback, **options
        )
        return results[:outputs], results[outputs:]

    @scan.def_vmap
    def _(size, batched, start, xs):
        def merged(is_batched, x):
            x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        results = scan(*jax.tree.map(merged, batched, [start, xs]))
        divided = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), results)
        return divided, jax.tree.map(lambda _: True, divided)

    return scan([*start], [*xs])


row_scan_p = Primitive("row_scan")
row_scan_p.multiple_results = True


@row_scan_p.def_impl
def _compiled(*args, **params):
    return jax.jit(partial(row_scan_p.bind, **params))(*args)


@row_scan_p.def_abstract_eval
def _shapes(*args, states: int, outputs: int, **_):
    start, first = args[:states], args[states]
    return [first.update(dtype=start[0].dtype)] * outputs + [*start]


def _by(kernel: Callable[..., Any]):
    """How to lower to a kernel, or to the fallback where the kernel says no."""

    def rule(ctx, *args, step, states, outputs, reverse, fallback):
        def lower(run):
            def flat(*args):
                ys, last = run(args[:states], args[states:])
                return [*ys, *last]

            return mlir.lower_fun(flat, multiple_results=True)(ctx, *args)

        try:
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


mlir.register_lowering(row_scan_p, _by(_no_kernel))
mlir.register_lowering(row_scan_p, _by(_tpu_kernel), platform="tpu")
mlir.register_lowering(row_scan_p, _by(row_scan_gpu.row_scan), platform="cuda")

KERNELS: dict[str, Callable[..., tuple[Sequences, Rows]]] = {
    "pallas": row_scan,
    "pallas_interpreted": partial(row_scan, interpret=True),
}
"""The methods that an operator runs by `row_scan`: on the device, or as if on a TPU."""
