"""Notes and faults for pairs in which torch has the channels first and JAX has them last."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from parity_tests.engine.bounds.tolerance import relative_errors
from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.problem import Problem
from parity_tests.engine.references.reference import Reference
from parity_tests.engine.results import Results, only_floating
from parity_tests.engine.verdict.report import Report

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
    outputs = _outputs(with_channels_last(problem, channels_last))
    if outputs is None:
        return None
    pairs = zip(oracle.get("outputs", {}).values(), outputs.values(), strict=False)
    are_last = any(channels_last(expected) == actual.shape for expected, actual in pairs)
    first, last = ORDERS[images[0].ndim]
    return (
        f"inputs: {images[0].shape} looks like {first}, and the JAX model takes {last}: it runs on "
        f"{channels_last(images[0])}. {advice(inputs=True, outputs=are_last)}"
    )


def faults_of_axes(
    problem: Problem, reference: Reference, report: Report, jax_side: JaxSide
) -> list[str]:
    """A fault that names the axes to move, if differing results agree in the other channel order.

    Only arrays that have the same shape in both orders are moved. For others, the shapes would
    differ, or JAX would have raised an error.
    """
    dtype, group, error = next(report.failures, ("", "", None))
    expected = only_floating(reference.oracle.get("outputs", {}))
    if error is None or group != "outputs":
        return []

    # Try to move the axes of the outputs, of the inputs, and of both.
    for what in ("outputs", "inputs", "inputs and outputs"):
        inputs, outputs = "inputs" in what, "outputs" in what
        trees = [*([problem.inputs] if inputs else []), *([expected] if outputs else [])]
        if not all(any(map(_is_square, jax.tree.leaves(tree))) for tree in trees):
            continue
        again = with_channels_last(problem, _is_square) if inputs else problem
        results = jax_side.run(again, dtype, reference.oracle.forward, reference.cast_to)
        moved = {
            name: np.moveaxis(array, -1, 1) if outputs and _is_square(array) else array
            for name, array in only_floating(results["outputs"]).items()
        }
        if all(each <= error.bound for each in relative_errors(moved, expected).values()):
            return [
                f"{what}: both sides agree if the JAX model has the channels on the last axis. "
                f"{advice(inputs=inputs, outputs=outputs)}"
            ]
    return []


def with_channels_last(problem: Problem, which: Callable[[Any], Any]) -> Problem:
    """The problem if the second axis of the inputs that `which` chooses is moved to the end."""
    inputs = jax.tree.map(lambda x: np.moveaxis(x, 1, -1) if which(x) else x, problem.inputs)
    return dataclasses.replace(problem, inputs=inputs)


def _outputs(problem: Problem) -> dict[str, np.ndarray] | None:
    """Zeros in the shapes of the JAX side's outputs; None if it cannot be traced."""
    try:
        return JaxSide(problem).shapes(problem)[0].get("outputs", {})
    except Exception:  # a model may raise anything
        return None


def _is_square(x: Any) -> bool:
    """True if x may be an image whose shape is the same with its channels last."""
    return channels_last(x) == getattr(x, "shape", ())
