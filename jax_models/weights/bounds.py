"""Parameters with bounds, which training must keep inside an interval."""

__all__ = ["project"]

from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jax_models.checks.values import described

Params = TypeVar("Params")


def bounds(param: nnx.Variable) -> tuple[float, float] | None:
    """The interval of a parameter made as `nnx.Param(value, bounds=(low, high))`."""
    return param.get_metadata().get("bounds")


def project(params: Params) -> Params:
    """Clips every parameter that has bounds to its interval.

        >>> module = nnx.Dict(a=nnx.Param(jnp.array([0.5, 1.2]), bounds=(0.0, 1.0)))
        >>> project(nnx.state(module))["a"].get_value().tolist()
        [0.5, 1.0]

    It returns a new tree. Call it after each step of an optimizer, as in projected gradient
    descent:

        params = project(optax.apply_updates(params, updates))

    Args:
        params: a tree of `nnx.Param`s, as `nnx.split` and `nnx.state` return it. Arrays outside an
            `nnx.Param` have no bounds and are returned unchanged.

    Raises:
        TypeError: `params` has a leaf that is neither an `nnx.Param` nor an array.

    """

    def inside(param):
        if not isinstance(param, nnx.Variable) and not hasattr(param, "dtype"):
            raise TypeError(f"params: expected a tree of parameters, got {described(param)}")
        interval = bounds(param) if isinstance(param, nnx.Variable) else None
        if interval is None:
            return param
        return param.replace(jnp.clip(param.get_value(), *interval))

    return jax.tree.map(inside, params, is_leaf=lambda node: isinstance(node, nnx.Variable))
