"""Layers of `torch.nn` as pure functions, with random arguments."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def problem(layer, batch: int = 4, time: int = 6, **masks):
    """A pure function of weights, inputs and state, and random values for them."""
    graphdef, weights, rest = nnx.split(layer, nnx.Param, ...)
    draw = np.random.default_rng(1).standard_normal
    dtype = layer.param_dtype
    x = jnp.asarray(draw((batch, time, layer.in_features)), dtype)
    state = jax.tree.map(lambda s: jnp.asarray(draw(s.shape), dtype), layer.init_state(batch))

    def function(weights, x, state):
        return nnx.merge(graphdef, weights, rest, copy=True)(x, state, **masks)

    return function, (weights, x, state)


def loss(results):
    return sum(jnp.sin(leaf + 0.3).sum() for leaf in jax.tree.leaves(results))


def with_gradients(function):
    """The results of a function, and the gradients of all its arguments."""

    def found(*args):
        results, pull_back = jax.vjp(function, *args)
        return results, pull_back(jax.tree.map(lambda y: jnp.cos(y + 0.1), results))

    return found
