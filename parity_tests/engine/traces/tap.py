"""Records the values of JAX arrays and of their gradients, under any transformation."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from parity_tests.engine.traces.trace import Call, Trace, map_arrays

tell_p = Primitive("tell")
"""A primitive that returns its operand, and passes the value to the function `tell`.

Unlike a plain Python call, it sees the value, and not a tracer, under any transformation.
"""
tell_p.def_abstract_eval(lambda x, *, tell: x)


@tell_p.def_impl
def _tell(x: jax.Array, *, tell: Callable[[np.ndarray], None]) -> jax.Array:
    tell(np.asarray(x))
    return x


def _tell_batch(operands, axes, *, tell):
    """Under vmap, the value has the mapped axis as its first."""
    return tell_p.bind(jnp.moveaxis(operands[0], axes[0], 0), tell=tell), 0


def _tell_from_device(x: jax.Array, *, tell: Callable[[np.ndarray], None]) -> jax.Array:
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda x: np.asarray(_tell(x, tell=tell)), shape, x)


batching.primitive_batchers[tell_p] = _tell_batch
mlir.register_lowering(tell_p, mlir.lower_fun(_tell_from_device, multiple_results=False))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def observed(forward: Callable, backward: Any, differentiated: Any, x: jax.Array) -> jax.Array:
    """The same array; `forward` is called with its value, and `backward` with its gradient.

    If the array is differentiated, `differentiated` is called.
    """
    return tell_p.bind(x, tell=forward)


def _forward(forward, backward, differentiated, x):
    differentiated()
    return tell_p.bind(x, tell=forward), None


def _backward(forward, backward, differentiated, _, gradient):
    if gradient.dtype == jax.dtypes.float0:
        return (None,)
    return (tell_p.bind(gradient, tell=backward),)


observed.defvjp(_forward, _backward)


def is_jax_array(value: Any) -> bool:
    """True for an array of numbers, including a traced one."""
    return isinstance(value, jax.Array | np.ndarray) and (
        jnp.issubdtype(value.dtype, jnp.number) or value.dtype == bool
    )


def observe(trace: Trace, call: Call, forward: str, backward: str, tree: Any) -> Any:
    """The same tree, whose values and gradients the trace keeps in these two slots of the call."""

    def observe_array(label: str, x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jnp.floating):
            call.dtypes[forward][label] = str(x.dtype)
        return observed(
            partial(trace.keep, call, forward, label),
            partial(trace.keep, call, backward, label),
            partial(call.differentiated.add, (forward, label)),
            jnp.asarray(x),
        )

    return map_arrays(tree, observe_array, is_jax_array)


_active: list[Trace] = []


@contextlib.contextmanager
def tapped(trace: Trace) -> Iterator[None]:
    """A context in which `tap` records values in the trace."""
    _active.append(trace)
    try:
        yield
    finally:
        _active.remove(trace)


def tap(name: str, x: Any) -> Any:
    """Names a value in a JAX function after the torch submodule that returns the same value.

    `x = tap("layers.0.mlp", mlp(x))` lets `compare(…, locate=True)` compare `x` with the output of
    the torch submodule `layers.0.mlp`. Outside of such a comparison, `tap` only returns `x`.

    Args:
        name: the name of the torch submodule; if it is called several times, `tap` each call.
        x: an array, or a tree of arrays.

    """
    if not isinstance(name, str):
        raise TypeError(f"name: expected the name of a torch submodule, got {name!r:.100}")
    for trace in _active:
        x = observe(trace, trace.begin(name, "tap"), "outputs", "output gradients", x)
    return x
