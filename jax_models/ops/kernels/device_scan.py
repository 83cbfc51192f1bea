"""A scan that runs as one kernel on devices for which there is a kernel."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.export import is_symbolic_dim
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

Kernel = Callable[..., tuple[Sequence[Array], Sequence[Array]]]
"""`kernel(step, start, xs, outputs=, reverse=)` returns the outputs of all steps, and the last
state.
"""


class DeviceScan:
    """A JAX primitive that chooses a kernel or the fallback when the program is lowered.

    Under `vmap`, the mapped axis becomes part of the rows. The derivative is that of the fallback.
    """

    def __init__(
        self,
        name: str,
        *,
        tpu: Kernel,
        gpu: Kernel | None = None,
        shapes: Callable[..., list[Any]],
        axis_of_rows: Callable[[Array], int],
        alternative: str,
    ):
        """Makes a scan of the given kernels.

        Args:
            name: the name of the primitive.
            tpu: the kernel by Mosaic, which also takes `interpret`.
            gpu: the kernel by Triton, if there is one.
            shapes: `shapes(step, start, xs, outputs)` returns the shapes of all outputs and last
                states.
            axis_of_rows: returns the axis of an array along which the rows of several scans are
                joined.
            alternative: the name of a method that works where no kernel does, for errors.

        """
        self.primitive = primitive = Primitive(name)
        self.shapes = shapes
        self.tpu = tpu
        self.axis_of_rows = axis_of_rows
        self.alternative = alternative
        primitive.multiple_results = True
        primitive.def_impl(jax.jit(primitive.bind, static_argnames=PARAMETERS))
        primitive.def_abstract_eval(self._abstract)
        batching.primitive_batchers[primitive] = self._batched
        ad.primitive_jvps[primitive] = self._jvp
        kernels = {None: _no_kernel, "tpu": self._tpu, "cuda": gpu or _no_kernel}
        for platform, kernel in kernels.items():
            mlir.register_lowering(primitive, self._lowered_by(kernel), platform=platform)

    def __call__(
        self,
        step: Callable[..., Any],
        start: Sequence[Array],
        xs: Sequence[Array],
        *,
        outputs: int,
        reverse: bool = False,
        interpret: bool = False,
        fallback: Callable[..., Any] | None = None,
    ) -> tuple[Sequence[Array], Sequence[Array]]:
        """Runs `state, ys_t = step(state, *xs_t)` for t = 0 … T−1, or T−1 … 0 with `reverse`.

        Args:
            step: the step, written with jnp. Pass the same function at each call, because compiled
                programs are cached by it.
            start: the state before the first step.
            xs: the inputs.
            outputs: the number of arrays that a step outputs.
            reverse: whether to run from the last step to the first.
            interpret: whether to run the TPU's kernel in Pallas's interpreter, on any device.
            fallback: `fallback(start, xs)` computes the same where no kernel works.

        Returns:
            The outputs of all steps, and the last state, in the dtype of the state.

        Raises:
            NotImplementedError: when the program is lowered, if there is neither a kernel nor a
                fallback.

        """
        options = {"step": step, "states": len(start), "outputs": outputs, "reverse": reverse}
        if interpret:
            results = self._interpreted(**options)(*start, *xs)
        else:
            results = self.primitive.bind(*start, *xs, fallback=fallback, **options)
        return results[:outputs], results[outputs:]

    def _abstract(self, *args, step, states: int, outputs: int, **_):
        return self.shapes(step, args[:states], args[states:], outputs)

    def _lowered_by(self, kernel: Kernel):
        """Returns a lowering to the kernel, or to the fallback for calls without a kernel."""

        def rule(ctx, *args, step, states, outputs, reverse, fallback):
            def lower(scan):
                return mlir.lower_fun(_flatten_scan(scan, states), multiple_results=True)(
                    ctx, *args
                )

            try:
                if any(is_symbolic_dim(size) for x in ctx.avals_in for size in x.shape):
                    raise NotImplementedError("a program for any size can have no kernel")
                if _is_auto_sharded(ctx.module_context.axis_context):
                    raise NotImplementedError("XLA cannot divide a kernel over devices by itself")
                return lower(partial(kernel, step, outputs=outputs, reverse=reverse))
            except NotImplementedError as error:
                if fallback is None:
                    raise NotImplementedError(
                        f'method: "pallas" cannot serve here, "{self.alternative}" can: {error}'
                    ) from error
                return lower(fallback)

        return rule

    def _tpu(self, step, start, xs, **options):
        """Runs the TPU's kernel without x64, because Mosaic does not support 64-bit integers."""
        with jax.enable_x64(False):
            return self.tpu(step, start, xs, **options)

    def _interpreted(self, *, step, states: int, **options):
        """Returns the TPU's kernel in Pallas's interpreter, which runs without the primitive."""
        scan = custom_vmap(
            _flatten_scan(partial(self.tpu, step, interpret=True, **options), states)
        )

        @scan.def_vmap
        def _(size, batched, *args):
            results = self._as_one_scan(scan, size, args, [0 if each else None for each in batched])
            return results, [True] * len(results)

        return scan

    def _as_one_scan(self, scan, size: int, args, axes):
        """Runs a batch of scans as a single scan with more rows."""

        def merged(x, axis):
            first = jnp.moveaxis(x, axis, 0) if axis is not None else x[None]
            every = jnp.broadcast_to(first, (size, *first.shape[1:]))
            at = self.axis_of_rows(every[0])
            every = jnp.moveaxis(every, 0, at)
            return every.reshape(*every.shape[:at], -1, *every.shape[at + 2 :])

        def divided(x):
            at = self.axis_of_rows(x)
            return jnp.moveaxis(x.reshape(*x.shape[:at], size, -1, *x.shape[at + 1 :]), at, 0)

        return [*map(divided, scan(*map(merged, args, axes)))]

    def _batched(self, args, axes, **params):
        size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
        results = self._as_one_scan(partial(self.primitive.bind, **params), size, args, axes)
        return results, [0] * len(results)

    def _jvp(self, primals, tangents, *, states: int, fallback, **params):
        if fallback is None:
            raise NotImplementedError(
                f'method: "pallas" has first derivatives only, '
                f'"auto" and "{self.alternative}" have all'
            )

        results = self.primitive.bind(*primals, states=states, fallback=fallback, **params)
        tangents = tuple(map(ad.instantiate_zeros, tangents))
        return results, jax.jvp(_flatten_scan(fallback, states), primals, tangents)[1]


def known_size(*axes) -> int:
    """The product of sizes, or 0 if one of them is symbolic."""
    return 0 if any(map(is_symbolic_dim, axes)) else math.prod(axes)


KERNEL_METHODS = {"pallas": False, "pallas_interpreted": True}
"""The methods that run a kernel, each with whether Pallas interprets it."""
PARAMETERS = ("step", "states", "outputs", "reverse", "fallback")


def _flatten_scan(scan: Kernel, states: int):
    """Flattens the arguments of a scan to states, inputs, and its results to outputs, states."""

    def flat(*args):
        ys, last = scan(args[:states], args[states:])
        return [*ys, *last]

    return flat


def _is_auto_sharded(context) -> bool:
    """Whether XLA divides the program over devices by itself, outside of `jax.shard_map`."""
    if hasattr(context, "manual_axes"):
        manual = context.manual_axes | frozenset(getattr(context.mesh, "manual_axes", ()))
        return manual != frozenset(context.mesh.axis_names)
    return getattr(context, "num_devices", 1) > 1


def _no_kernel(*_, **__):
    raise NotImplementedError("it has no kernel for this platform")
