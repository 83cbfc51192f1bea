"""Errors that say when torch has the channels first and JAX has them last."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.faults import ORDERS, channels_last, other_order
from parity_tests.engine.problem import Problem
from parity_tests.engine.results import Results


def note_on_inputs(problem: Problem, oracle: Results) -> str | None:
    """The note for a JAX side that raises, if it runs on inputs with the channels last."""

    def moved(x):
        return np.moveaxis(x, 1, -1) if _is_image(x) else x

    shapes = [tuple(x.shape) for x in jax.tree.leaves(problem.inputs) if _is_image(x)]
    if not shapes:
        return None
    again = dataclasses.replace(problem, inputs=jax.tree.map(moved, problem.inputs))
    results = _results(again) if _results(problem) is None else None
    if results is None:
        return None
    theirs = [a.shape for a in oracle.get("outputs", {}).values()]
    ours = [a.shape for a in results.get("outputs", {}).values()]
    call = "model(jnp.moveaxis(x, 1, -1))"
    if any(map(other_order, theirs, ours)):
        call = f"jnp.moveaxis({call}, -1, 1)"
    first, last = ORDERS[len(shapes[0])]
    return (
        f"inputs: {shapes[0]} looks like {first}, and the JAX model takes {last}: it runs on "
        f"{channels_last(shapes[0])}. Move the axes in the function, or with "
        f"call=lambda model, x: {call}"
    )


def _results(problem: Problem) -> Results | None:
    """Zeros in the shapes of the JAX side's results; None if it cannot be traced."""
    try:
        return JaxSide(problem).shapes(problem)[0]
    except Exception:  # a model may raise anything
        return None


def _is_image(x: Any) -> bool:
    """Is x a real array of enough axes to have channels?"""
    return getattr(x, "ndim", 0) in ORDERS and jnp.issubdtype(x.dtype, jnp.floating)
