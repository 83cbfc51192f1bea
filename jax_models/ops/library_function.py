"""Functions that a library computes together with their gradients, such as those of cuDNN."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_models.ops.by_platform import by_platform
from jax_models.ops.linear_map import linear_map


class LibraryFunction(NamedTuple):
    """A function that a library computes, and its definition in JAX.

    The library computes the results and, in reverse mode, the gradients. The definition computes
    everything else: forward mode, second derivatives, and programs that `jax.export` stores, since
    they may run where the library is missing. In a stored program, the backward pass begins with
    another forward pass, because only the library can read what it kept for the gradients.

    The functions receive static arguments as one hashable value, the floating arrays as one pytree,
    and all other arrays as another. They must be functions of a module, because JAX caches compiled
    programs by the function.
    """

    definition: Callable[[Any, Any, Any], Any]
    """`definition(static, floats, others)` returns the results."""
    forward: Callable[[Any, bool, Any, Any], tuple[Any, Any]]
    """`forward(static, keep, floats, others)` returns the results and, if `keep`, the floating
    arrays that the gradient needs besides.
    """
    gradient: Callable[[Any, Any, Any, Any, Any, Any], Any]
    """`gradient(static, floats, others, results, kept, gradients)` returns the gradients with
    respect to `floats`, given those with respect to the results.
    """

    def __call__(self, static: Hashable, floats: Any, others: Any) -> Any:
        """Returns the results."""
        results, _ = _forward(self, static, False, floats, others)
        return results


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _forward(function: LibraryFunction, static, keep: bool, floats, others):
    forward = partial(function.forward, static, keep)

    def exported(floats, others):
        _, kept = jax.eval_shape(forward, floats, others)
        zeros = jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), kept)
        return function.definition(static, floats, others), zeros

    return by_platform(floats, others, default=forward, export=exported)


@_forward.defjvp
def _forward_jvp(function: LibraryFunction, static, keep: bool, primals, tangents):
    (floats, others), (d_floats, _) = primals, tangents
    results, kept = _forward(function, static, True, floats, others)
    residuals = floats, others, results, kept
    d_results = linear_map(_tangent, _gradient, residuals, d_floats, function, static)
    # Only `_gradient` reads what was kept, and its own derivative does not need the tangents.
    d_kept = jax.tree.map(jnp.zeros_like, kept)
    return ((results, kept), (d_results, d_kept)) if keep else ((results, ()), (d_results, ()))


def _tangent(function: LibraryFunction, static, residuals, d_floats):
    floats, others, *_ = residuals

    def definition(floats):
        return function.definition(static, floats, others)

    return jax.jvp(definition, (floats,), (d_floats,))[1]


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _gradient(function: LibraryFunction, static, residuals, gradients):
    def by_library(residuals, gradients):
        floats, others, results, kept = residuals
        return function.gradient(static, floats, others, results, kept, gradients)

    def exported(residuals, gradients):
        floats, others, *_ = residuals
        return _gradient_of_definition(function, static, others, floats, gradients)

    return by_platform(residuals, gradients, default=by_library, export=exported)


@_gradient.defjvp
def _gradient_jvp(function: LibraryFunction, static, primals, tangents):
    """Computes everything again from the arguments."""
    (floats, others, *_), gradients = primals
    (d_floats, *_), d_gradients = tangents
    gradient = partial(_gradient_of_definition, function, static, others)
    _, d_found = jax.jvp(gradient, (floats, gradients), (d_floats, d_gradients))
    return _gradient(function, static, *primals), d_found


def _gradient_of_definition(function: LibraryFunction, static, others, floats, gradients):
    _, pull_back = jax.vjp(lambda floats: function.definition(static, floats, others), floats)
    return pull_back(gradients)[0]
