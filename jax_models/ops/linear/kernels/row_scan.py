"""A recurrence of elementwise steps as a JAX primitive, which is lowered to a single kernel."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array

Kernel = Callable[..., tuple[Sequence[Array], Sequence[Array]]]
"""`kernel(step, start, xs, outputs=, reverse=)` returns the outputs of all steps, and the last
state.
"""


class RowScan:
    """Scans elementwise steps over states (batch, features) and inputs (batch, time, features).

    A kernel runs over time once, reads each input once and keeps the state on the chip. On a TPU it
    is compiled by Mosaic (`row_scan_tpu`), and on an NVIDIA GPU by Triton (`row_scan_gpu`). The GPU
    kernel was measured on an H100. The TPU kernel was compiled for TPUs and runs in an interpreter,
    but has not run on a TPU yet. The inputs may have any floating dtype; a step receives them in
    the dtype of the states, which is that of the accumulation. No kernel works in float64 on a TPU,
    or if XLA rather than `shard_map` divides the program over devices.

    Under `vmap`, the mapped axis becomes part of the batch. There is no derivative.
    """

    def __init__(self, name: str, **kernels: Kernel):
        """Makes the primitive `name` with a kernel for each platform, such as `cuda`."""
        self.primitive = primitive = Primitive(name)
        self.kernels = kernels
        primitive.multiple_results = True
        primitive.def_impl(
            jax.jit(primitive.bind, static_argnames=("step", "states", "outputs", "reverse"))
        )
        primitive.def_abstract_eval(_shapes)
        batching.primitive_batchers[primitive] = self._batched
        mlir.register_lowering(primitive, self._lowering("default"))
        for platform in ("cpu", "cuda", "tpu"):
            mlir.register_lowering(primitive, self._lowering(platform), platform=platform)

    def __call__(
        self,
        step: Callable[..., Any],
        start: Sequence[Array],
        xs: Sequence[Array],
        *,
        outputs: int,
        reverse: bool = False,
    ) -> tuple[Sequence[Array], Sequence[Array]]:
        """Runs `state, ys_t = step(state, *xs_t)` for t = 0 … T−1, or T−1 … 0 with `reverse`.

        Args:
            step: the step, written with jnp. Pass the same function at each call, because compiled
                programs are cached by it.
            start: the state before the first step.
            xs: the inputs.
            outputs: the number of arrays that a step outputs.
            reverse: whether to run from the last step to the first.

        Returns:
            The outputs of all steps, and the last state, in the dtype of the state.

        Raises:
            NotImplementedError: when the program is lowered, if there is no kernel for it.

        """
        options = {"step": step, "outputs": outputs, "reverse": reverse}
        results = self.primitive.bind(*start, *xs, states=len(start), **options)
        return results[:outputs], results[outputs:]

    def _lowering(self, platform: str):
        def rule(ctx, *args, step, states: int, **options):
            sizes = {size for x in ctx.avals_in for size in x.shape}
            try:
                if platform not in self.kernels:
                    raise NotImplementedError("it has no kernel for this platform")
                if any(map(is_symbolic_dim, sizes)):
                    raise NotImplementedError("a program for any size can have no kernel")
                if _is_auto_sharded(ctx.module_context.axis_context):
                    raise NotImplementedError("XLA cannot divide a kernel over devices by itself")
                kernel = partial(self.kernels[platform], step, **options)

                def flat(*args):
                    ys, last = kernel(args[:states], args[states:])
                    return [*ys, *last]

                return mlir.lower_fun(flat, multiple_results=True)(ctx, *args)
            except NotImplementedError as error:
                raise NotImplementedError(
                    f'method: "pallas" cannot serve here, "associative" can: {error}'
                ) from error

        return rule

    def _batched(self, args, axes, **params):
        """Runs a batch of scans as a single scan with more rows."""
        size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)

        def merged(x, axis):
            first = jnp.moveaxis(x, axis, 0) if axis is not None else x[None]
            every = jnp.broadcast_to(first, (size, *first.shape[1:]))
            return every.reshape(-1, *every.shape[2:])

        results = self.primitive.bind(*map(merged, args, axes), **params)
        return [y.reshape(size, -1, *y.shape[1:]) for y in results], [0] * len(results)


def _shapes(*args, step, states: int, outputs: int, reverse: bool):
    start, xs = args[:states], args[states:]
    return [xs[0].update(dtype=start[0].dtype)] * outputs + [*start]


def _is_auto_sharded(context) -> bool:
    """Whether XLA divides the program over devices by itself, outside of `jax.shard_map`."""
    if hasattr(context, "manual_axes"):
        manual = context.manual_axes | frozenset(getattr(context.mesh, "manual_axes", ()))
        return manual != frozenset(context.mesh.axis_names)
    return getattr(context, "num_devices", 1) > 1
