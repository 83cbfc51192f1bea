"""Gradient accumulation: only the activations of one part of a batch are in memory at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def accumulate_gradients(
    value_and_grad: Callable[..., tuple[Any, Any]],
) -> Callable[..., tuple[Any, Any]]:
    """Computes the losses and the gradient part by part, and returns their means over the parts.

    Turns `value_and_grad(params, key, *batch)` into a function whose batch arrays have an
    additional leading axis for the parts. The parts are equally large, so the means are those of
    the whole batch, except for losses that are not a mean over tokens. Each part has its own key,
    so the dropout masks differ from those of the whole batch.
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
