"""Linear functions with a given transpose, differentiable in both modes and to any order."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from jax_models.ops.shard_map_axes import match_varying_axes

LinearFunction = Callable[..., Any]
"""`f(*static, residuals, x)`, linear in x. Pass a module-level function, because JAX reuses
compiled programs for the same function and equal static arguments.
"""


def linear_map(
    function: LinearFunction, transpose: LinearFunction, residuals: Any, x: Any, *static: Any
) -> Any:
    """Applies `function` to static arguments, residuals and x, with `transpose` as its transpose.

    Unlike `jax.custom_derivatives.linear_call`, it can be differentiated with respect to the
    residuals and mapped by `vmap`. x may be any tree of floating arrays, and the residuals any tree
    of arrays. If a `jax.custom_jvp` rule returns the result of such a map, reverse mode uses
    `transpose`.
    """
    structure = jax.tree.structure(x)
    residual_leaves, residual_structure = jax.tree.flatten(residuals)
    leaves = match_varying_axes([*jax.tree.leaves(x), *residual_leaves])[: structure.num_leaves]
    y = jax.eval_shape(partial(_call, function, static), residuals, structure.unflatten(leaves))
    trees = residual_structure, structure, jax.tree.structure(y)
    params = _Map(function, transpose, static, *trees)
    return params.y.unflatten(linear_map_p.bind(*residual_leaves, *leaves, map=params))


@partial(jax.jit, static_argnums=(0, 1))  # traced once for shapes and programs
def _call(function: LinearFunction, static: tuple[Any, ...], residuals: Any, x: Any) -> Any:
    return function(*static, residuals, x)


class _Map(NamedTuple):
    """A function, its transpose, their static arguments, and the structures of all trees."""

    function: LinearFunction
    transpose: LinearFunction
    static: tuple[Any, ...]
    residuals: Any
    x: Any
    y: Any

    def split(self, leaves: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Splits leaves into those of the residuals and those of x."""
        return leaves[: self.residuals.num_leaves], leaves[self.residuals.num_leaves :]

    def __call__(self, *leaves: Array) -> list[Array]:
        residuals, x = self.split(leaves)
        trees = self.residuals.unflatten(residuals), self.x.unflatten(x)
        return jax.tree.leaves(_call(self.function, self.static, *trees))

    def transposed(self) -> "_Map":
        """Returns the transposed map, from y to x."""
        return self._replace(function=self.transpose, transpose=self.function, x=self.y, y=self.x)


linear_map_p = Primitive("linear_map")
linear_map_p.multiple_results = True


@linear_map_p.def_impl
@partial(jax.jit, static_argnames="map")
def _compiled(*leaves, map: _Map):
    return map(*leaves)


@linear_map_p.def_effectful_abstract_eval
def _shapes(*leaves, map: _Map):
    traced = jax.make_jaxpr(lambda *leaves: map(*leaves))(*leaves)
    return traced.out_avals, traced.effects


mlir.register_lowering(
    linear_map_p, mlir.lower_fun(lambda *leaves, map: map(*leaves), multiple_results=True)
)


def _jvp(primals, tangents, *, map: _Map):
    """Maps the tangents of x, and adds the derivative with respect to the residuals."""
    residuals, x = map.split(primals)
    residual_tangents, x_tangents = map.split(tangents)
    # The result is linear in x, so the tangents of x go through the same map.
    y = linear_map_p.bind(*primals, map=map)
    y_tangents = []
    if not all(type(t) is ad.Zero for t in x_tangents):
        x_tangents = [ad.instantiate_zeros(t) for t in x_tangents]
        y_tangents.append(linear_map_p.bind(*residuals, *x_tangents, map=map))
    # The residuals need not enter linearly, so differentiate the function with respect to those
    # whose tangents are not zero.
    moving = [i for i, t in enumerate(residual_tangents) if type(t) is not ad.Zero]
    if moving:

        def with_residuals(*values):
            leaves = list(residuals)
            for i, residual in zip(moving, values, strict=True):
                leaves[i] = residual
            return map(*leaves, *x)

        _, y_tangent = jax.jvp(
            with_residuals,
            tuple(residuals[i] for i in moving),
            tuple(residual_tangents[i] for i in moving),
        )
        y_tangents.append(y_tangent)
    return y, [sum(parts[1:], start=parts[0]) for parts in zip(*y_tangents, strict=True)]


def _transpose(cotangents, *leaves, map: _Map):
    residuals, x = map.split(leaves)
    cotangents = [ad.instantiate_zeros(c) for c in cotangents]
    gradients = linear_map_p.bind(*residuals, *cotangents, map=map.transposed())
    of_x = [
        g if ad.is_undefined_primal(leaf) else None for g, leaf in zip(gradients, x, strict=True)
    ]
    return [None] * len(residuals) + of_x


class _Batched(NamedTuple):
    """A linear function under `vmap`: all of x is mapped, and residuals with a mapped axis."""

    function: LinearFunction
    axes: tuple[int | None, ...]

    def __call__(self, *args):
        *static, residuals, x = args
        leaves, structure = jax.tree.flatten(residuals)

        def function(leaves, x):
            return self.function(*static, structure.unflatten(leaves), x)

        return jax.vmap(function, in_axes=([*self.axes], 0))(leaves, x)


def _batch(leaves, axes, *, map: _Map):
    size = next(x.shape[axis] for x, axis in zip(leaves, axes, strict=True) if axis is not None)
    first = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(leaves, axes, strict=True)
    ]
    residuals, x = map.split(first)
    residual_axes, x_axes = map.split(axes)
    x = [
        jnp.broadcast_to(each, (size, *each.shape)) if axis is None else each
        for each, axis in zip(x, x_axes, strict=True)
    ]
    mapped = tuple(None if axis is None else 0 for axis in residual_axes)
    batched = map._replace(
        function=_Batched(map.function, mapped), transpose=_Batched(map.transpose, mapped)
    )
    y = linear_map_p.bind(*residuals, *x, map=batched)
    return y, [0] * len(y)


ad.primitive_jvps[linear_map_p] = _jvp
ad.primitive_transposes[linear_map_p] = _transpose
batching.primitive_batchers[linear_map_p] = _batch
