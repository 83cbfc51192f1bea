"""Notes on pairs in which torch has the channels first and JAX has them last."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.problem import Problem
from parity_tests.engine.results import Results

ORDERS = {
    3: ("(N, C, L)", "(N, L, C)"),
    4: ("(N, C, H, W)", "(N, H, W, C)"),
    5: ("(N, C, D, H, W)", "(N, D, H, W, C)"),
}
"""The names of the axes by rank, with the channels first (as in torch) and with them last."""


def channels_last(x: Any) -> tuple[int, ...] | None:
    """The shape of x with its second axis as the last; None if x cannot be an image."""
    if getattr(x, "ndim", 0) not in ORDERS or not jnp.issubdtype(x.dtype, jnp.floating):
        return None
    return (*x.shape[:1], *x.shape[2:], x.shape[1])


def advice(*, inputs: bool, outputs: bool) -> str:
    """How a JAX model that has the channels last gets and returns them in torch's order."""
    call = f"model({'jnp.moveaxis(x, 1, -1)' if inputs else 'x'})"
    call = f"jnp.moveaxis({call}, -1, 1)" if outputs else call
    return f"Move the axes in the function, or with call=lambda model, x: {call}"


def note_on_inputs(problem: Problem, oracle: Results) -> str | None:
    """A note for a JAX side that raises an error, if it would run on inputs with channels last."""
    images = [x for x in jax.tree.leaves(problem.inputs) if channels_last(x)]
    if not images or _outputs(problem) is not None:
        return None
    moved = jax.tree.map(lambda x: np.moveaxis(x, 1, -1) if channels_last(x) else x, problem.inputs)
    outputs = _outputs(dataclasses.replace(problem, inputs=moved))
    if outputs is None:
        return None
    pairs = zip(oracle.get("outputs", {}).values(), outputs.values(), strict=False)
    are_last = any(channels_last(expected) == actual.shape for expected, actual in pairs)
    first, last = ORDERS[images[0].ndim]
    return (
        f"inputs: {images[0].shape} looks like {first}, and the JAX model takes {last}: it runs on "
        f"{channels_last(images[0])}. {advice(inputs=True, outputs=are_last)}"
    )


def _outputs(problem: Problem) -> dict[str, np.ndarray] | None:
    """Zeros in the shapes of the JAX side's outputs; None if it cannot be traced."""
    try:
        return JaxSide(problem).shapes(problem)[0].get("outputs", {})
    except Exception:  # a model may raise anything
        return None
