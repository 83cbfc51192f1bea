"""Gradient accumulation: only the activations of one part of a batch are in memory at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def accumulated(
    value_and_grad: Callable[..., tuple[Float[Array, ""], Any]],
) -> Callable[..., tuple[Float[Array, ""], Any]]:
    """The mean loss and gradient over parts of equal size, which equal those of the whole batch.

    `value_and_grad(params, key, *batch)` becomes a function whose batch has a further leading axis
    for the parts. Each part has its own key, so the dropout masks differ from those of the whole.
    """

    def over_parts(params, key, *parts):
        count = parts[0].shape[0]
        if count == 1:
            return value_and_grad(params, key, *(x[0] for x in parts))

        def add(total, part):
            index, batch = part
            one = value_and_grad(params, jax.random.fold_in(key, index), *batch)
            return jax.tree.map(jnp.add, total, one), None

        shapes = jax.eval_shape(value_and_grad, params, key, *(x[0] for x in parts))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        total, _ = jax.lax.scan(add, zeros, (jnp.arange(count), parts))
        return jax.tree.map(lambda x: x / count, total)

    return over_parts
