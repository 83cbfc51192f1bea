"""The gradient of a batch, part by part: a part's activations are all that is kept at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

ValueAndGrad = Callable[
    [Any, PRNGKeyArray, Int[Array, "rows window+1"]], tuple[Float[Array, ""], Any]
]
"""The mean loss of rows and its gradient, by the parameters, a key for dropout and the rows."""


def accumulated(value_and_grad: ValueAndGrad, parts: int) -> ValueAndGrad:
    """The same mean loss and gradient, computed in so many equal parts of the rows.

    They are equal up to rounding. Each part has a key of its own, hence other dropout masks than
    the whole has.
    """
    if parts == 1:
        return value_and_grad

    def over_parts(params, key, rows):
        def add(total, part):
            index, rows = part
            one = value_and_grad(params, jax.random.fold_in(key, index), rows)
            return jax.tree.map(jnp.add, total, one), None

        rows = rows.reshape(parts, -1, *rows.shape[1:])
        shapes = jax.eval_shape(value_and_grad, params, key, rows[0])
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        total, _ = jax.lax.scan(add, zeros, (jnp.arange(parts), rows))
        return jax.tree.map(lambda x: x / parts, total)

    return over_parts
