"""Calls of layers under a mesh with Explicit axes."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

Call = TypeVar("Call", bound=Callable[..., Any])


def with_auto_axes(call: Call) -> Call:
    """Wraps the call of a layer or a model so that it runs with Auto axes under an Explicit mesh.

    With Explicit axes, JAX refuses every operation whose result could be sharded in several ways,
    such as a projection from sharded features, or a scan from zeros over a sharded batch. With Auto
    axes, the compiler chooses the sharding. The outputs are sharded like x, except for their
    features, which are not sharded. The last state is sharded like the given state. If no state is
    given, the batch axis of the last state is sharded like that of x.
    """
    signature = inspect.signature(call)

    @functools.wraps(call)
    def wrapped(layer, *args, **kwargs):
        explicit_axes = jax.sharding.get_abstract_mesh().explicit_axes
        if not explicit_axes:
            return call(layer, *args, **kwargs)
        bound = signature.bind(layer, *args, **kwargs)
        bound.apply_defaults()
        (_, x, state), masks = bound.args, bound.kwargs
        # `auto_axes` converts only its arguments, so every array must be one, including the layer's
        # own.
        graphdef, variables = nnx.split(layer)
        leaves, structure = jax.tree.flatten((variables, x, state, masks))
        arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}

        def run(arrays):
            inputs = [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
            variables, x, state, masks = structure.unflatten(inputs)
            layer = nnx.merge(graphdef, variables, copy=True)
            y, last_state = call(layer, x, state, **masks)
            return y, last_state, assigned_variables(variables, nnx.state(layer))

        # `run` works on a copy of the layer, so it also returns the variables that the call
        # changed.
        out_sharding = (*_output_specs(layer, x, state), P())
        auto: Any = jax.sharding.auto_axes(run, axes=explicit_axes, out_sharding=out_sharding)
        y, last_state, changes = auto(arrays)
        nnx.update(layer, changes)
        return y, last_state

    return wrapped  # pyright: ignore[reportReturnType]


def _output_specs(layer, x, state) -> tuple[P, Any]:
    """Returns the shardings of the outputs and of the last state."""
    spec, time_major = _spec(x), getattr(layer, "time_major", None)
    if time_major is not None:  # a sequence layer; models read tokens or samples, not features
        spec = P(*spec[:-1])
    if state is not None:
        return spec, jax.tree.map(_spec, state)
    # The batch axis of a state is the one whose size depends on the batch size.
    batch = None if len(spec) < 2 else spec[1 if time_major else 0]
    shapes = [jax.eval_shape(lambda size=size: layer.init_state(size)) for size in (1, 2)]

    def along_batch(one, two) -> P:
        if batch is None:  # x may be unbatched, and then the state has no batch axis
            return P()
        return P(*(None if a == b else batch for a, b in zip(one.shape, two.shape, strict=True)))

    return spec, jax.tree.map(along_batch, *shapes)


def _spec(array: Any) -> P:
    return jax.typeof(array).sharding.spec if isinstance(array, jax.Array) else P()


def assigned_variables(before: nnx.State, after: nnx.State) -> nnx.State:
    """Returns the variables that a call assigned to, such as dropout's count of random keys."""
    old = {path: variable.get_raw_value() for path, variable in nnx.to_flat_state(before)}
    new = nnx.to_flat_state(after)
    return nnx.from_flat_state([(k, v) for k, v in new if v.get_raw_value() is not old.get(k)])
