"""The kernels of the shared library, those of recurrences as functions of JAX arrays."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

import twinscan_native
from jax_models.ops.forms import refusal_of_symbolic

BATCH_AXES = {
    **dict.fromkeys(("kernel_x", "kernel", "bias", "bias_hn")),
    **dict.fromkeys(("start", "last", "d_last"), 1),
}
"""The batch axes of operands and results that are not 0. The weights have none."""


class Kind(NamedTuple):
    """A recurrence for which there are kernels."""

    name: str
    """The recurrence in the names of the kernels."""
    num_kept: int
    """How many arrays the forward kernel keeps for the backward kernel, in each direction."""
    num_overwritten: int
    """How many of these, from the first on, the backward kernel overwrites with its results."""
    options: tuple[tuple[str, Any], ...] = ()
    """Further attributes of the kernels."""


LSTM = Kind("lstm", num_kept=2, num_overwritten=1)
GRU = Kind("gru", num_kept=2, num_overwritten=2)
RNN, RELU = (Kind("rnn", 0, 0, (("relu", relu),)) for relu in (False, True))


@cache
def loading_error() -> str | None:
    """Loads the library. Returns why this failed, or None."""
    try:
        twinscan_native.library()
    except OSError as error:
        return f"the library of twinscan-native cannot be loaded: {error}"
    return None


@cache
def target(kernel: str) -> str:
    """Registers a kernel of the library with XLA, and returns its name there."""
    name = f"twinscan_{kernel}"
    function = jax.ffi.pycapsule(getattr(twinscan_native.library(), name))
    jax.ffi.register_ffi_target(name, function, platform="cpu")
    return name


def refusal_of(
    call: Any, *arrays: jax.Array, types: tuple[str, ...] = ("float32", "float64")
) -> str | None:
    """Returns why there is no kernel for a call, or None if there is one.

    All sizes in the call must be known, and these arrays must have the same of these types.
    """
    sizes = (size for array in jax.tree.leaves(call) for size in array.shape)
    if reason := refusal_of_symbolic(*sizes):
        return reason
    found = sorted({str(array.dtype) for array in arrays})
    if len(found) > 1 or found[0] not in types:
        return f"it computes in {' or in '.join(types)}, not in {' and '.join(found)}"
    device = jax.config.jax_default_device or jax.default_backend()  # pyright: ignore
    platform = getattr(device, "platform", device)
    if platform != "cpu":
        return f"it runs on a CPU, and JAX's default device is a {platform}"
    return loading_error()


def call_kernel(
    kernel: str, shapes: list[Any], *arrays: jax.Array, **options: Any
) -> Sequence[jax.Array]:
    """Calls a kernel that takes rows of a batch, to which `vmap` adds its own."""
    function = jax.ffi.ffi_call(target(kernel), shapes, vmap_method="broadcast_all")
    return function(*arrays, **options)


class Kernel(NamedTuple):
    """One of the kernels, with its static arguments."""

    kind: Kind
    way: Literal["forward", "backward"]
    keep: bool = False
    """Whether the forward kernel keeps what the backward kernel needs."""

    def __call__(self, operands: dict[str, Any]) -> dict[str, Any]:
        """Runs the kernel. Operands are named as in `by_library`, results as in `shapes`."""
        leaves, tree = jax.tree.flatten(operands)
        results = jax.tree.structure(self.shapes(jax.tree.map(jax.typeof, operands)))
        return results.unflatten(kernel_p.bind(*leaves, kernel=self, tree=tree))

    def shapes(self, operands: dict[str, Any]) -> dict[str, Any]:
        """The shapes of the results, in the order of the kernel."""
        kernel, start = operands["kernel"], operands["start"]
        directions, hidden, gates = kernel.shape
        batch, time = operands["x" if self.way == "forward" else "y"].shape[:2]
        of_gates, of_state = (
            (kernel.update(shape=(batch, time, size)),) * directions for size in (gates, hidden)
        )
        if self.way == "forward":
            y = kernel.update(shape=(batch, time, directions * hidden))
            kept = (of_gates, of_state)[: self.kind.num_kept if self.keep else 0]
            return {"y": y, "last": start, "kept": kept}
        n_h = {"n_h": of_state} if self.kind == GRU else {}
        return {"gates_x": of_gates, **n_h, "start": start}

    def by_library(self, operands: dict[str, Any]) -> dict[str, Any]:
        """Calls the foreign function, which takes its operands in the order of this function."""
        names = ["x", "kernel_x", "bias", "kernel", "bias_hn", "start"]
        if self.way == "backward":
            names = ["d_y", "d_last", "kernel", "y", "start", "kept"]
        arrays = jax.tree.leaves([operands.get(name) for name in names])
        # The kernel reads lengths and, unless the array is empty, the restarts of each direction.
        kernel, rows = operands["kernel"], operands["rows"]
        directions, (batch, time, _) = len(kernel), operands[names[0]].shape
        lengths = jnp.full(batch, time, jnp.int32) if rows.lengths is None else rows.lengths
        reset = jnp.zeros((directions, batch, 0), bool)
        if rows.reset is not None:
            reset = jnp.stack([rows.restarts(reverse=index == 1) for index in range(directions)])
        options = {"reverse": np.int64(2 if directions == 2 else 0), **dict(self.kind.options)}
        results = self.shapes(jax.tree.map(jax.typeof, operands))
        shapes, tree = jax.tree.flatten([*results.values()])
        if self.way == "forward":
            aliases, options["keep"] = {}, self.keep
        else:
            first_kept = len(arrays) - self.kind.num_kept * directions
            aliases = {first_kept + i: i for i in range(self.kind.num_overwritten * directions)}
        name = target(f"{self.kind.name}_{self.way}")
        function = jax.ffi.ffi_call(name, shapes, input_output_aliases=aliases)
        arrays = function(*arrays, lengths, reset, **options)
        return dict(zip(results, tree.unflatten(arrays), strict=True))


kernel_p = Primitive("twinscan_native")
kernel_p.multiple_results = True


@kernel_p.def_abstract_eval
def _shapes(*operands, kernel: Kernel, tree):
    return jax.tree.leaves(kernel.shapes(tree.unflatten(operands)))


@kernel_p.def_impl
@partial(jax.jit, static_argnames=("kernel", "tree"))
def _run(*leaves, kernel: Kernel, tree):
    return jax.tree.leaves(kernel.by_library(tree.unflatten(leaves)))


def _refuse(*_, **__):
    raise NotImplementedError("method='native' runs on a CPU only; use method='xla'")


mlir.register_lowering(kernel_p, _refuse)
mlir.register_lowering(kernel_p, mlir.lower_fun(_run, multiple_results=True), platform="cpu")


def _batch_axes(operands: dict[str, Any]) -> list[int | None]:
    paths = jax.tree_util.tree_leaves_with_path(operands)
    return [BATCH_AXES.get(name.key, 0) for (name, *_), _ in paths]


def _batch(leaves, axes, *, kernel: Kernel, tree):
    """Makes the mapped axis a part of the batch, unless each element has weights of its own."""
    bind = partial(kernel_p.bind, kernel=kernel, tree=tree)
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
    result_axes = _batch_axes(kernel.shapes(operands))
    return [*map(divided, results, result_axes)], result_axes


batching.primitive_batchers[kernel_p] = _batch
