"""Computes the expected result of a problem in float64."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.problem import Arrays


def in_float64(function: Callable[..., jax.Array], arrays: Arrays, cotangent: np.ndarray) -> Arrays:
    """`y`, and the gradients under the names of the arrays, which are keyword arguments."""
    jax.config.update("jax_platforms", "cpu")  # the timings run in other processes
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(x, jnp.float64) for name, x in arrays.items()}
        y, gradients = _y_and_gradients(function, wide, jnp.asarray(cotangent, jnp.float64))
    return {name: np.asarray(x) for name, x in {"y": y, **gradients}.items()}


@partial(jax.jit, static_argnums=0)  # one program compiles faster than two
def _y_and_gradients(function, arrays, cotangent):
    y, pullback = jax.vjp(lambda arrays: function(**arrays), arrays)
    (gradients,) = pullback(cotangent)
    return y, gradients
