"""Notes and faults for pairs in which torch has the channels first and JAX has them last."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from parity_tests.engine.bounds.tolerance import relative_errors
from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.faults import ORDERS, channels_last, other_order
from parity_tests.engine.problem import Problem
from parity_tests.engine.references.reference import Reference
from parity_tests.engine.report import Report
from parity_tests.engine.results import Results, only_floating


def note_on_inputs(problem: Problem, oracle: Results) -> str | None:
    """The note for a JAX side that raises, if it runs on inputs with the channels last."""
    shapes = [tuple(x.shape) for x in jax.tree.leaves(problem.inputs) if _is_image(x)]
    if not shapes:
        return None
    again = with_channels_last(problem, _is_image)
    results = _results(again) if _results(problem) is None else None
    if results is None:
        return None
    theirs = [a.shape for a in oracle.get("outputs", {}).values()]
    ours = [a.shape for a in results.get("outputs", {}).values()]
    first, last = ORDERS[len(shapes[0])]
    move = _move(inputs=True, outputs=any(map(other_order, theirs, ours)))
    return (
        f"inputs: {shapes[0]} looks like {first}, and the JAX model takes {last}: it runs on "
        f"{channels_last(shapes[0])}. {move}"
    )


def faults_of_axes(
    problem: Problem, reference: Reference, report: Report, jax_side: JaxSide
) -> Iterator[str]:
    """Which axes to move, if results that differ agree with the channels on the other axis.

    Only arrays that have the same shape in both orders are moved. For others, the shapes would
    differ, or JAX would have raised an error.
    """
    dtype, group, error = next(report.failures, ("", "", None))
    expected = only_floating(reference.oracle.get("outputs", {}))
    if error is None or group != "outputs" or not expected:
        return
    may_move = [
        any(map(_is_square, arrays))
        for arrays in (jax.tree.leaves(problem.inputs), expected.values())
    ]
    for inputs, outputs in ((False, True), (True, False), (True, True)):
        if (inputs and not may_move[0]) or (outputs and not may_move[1]):
            continue
        again = with_channels_last(problem, _is_square) if inputs else problem
        results = jax_side.run(again, dtype, reference.oracle.forward, reference.cast_to)
        ours = {
            name: np.moveaxis(array, -1, 1) if outputs and _is_square(array) else array
            for name, array in only_floating(results["outputs"]).items()
        }
        if all(e <= error.bound for e in relative_errors(ours, expected).values()):
            what = "inputs and outputs" if inputs and outputs else "inputs" if inputs else "outputs"
            yield (
                f"{what}: both sides agree if the JAX model has the channels on the last axis. "
                f"{_move(inputs=inputs, outputs=outputs)}"
            )
            return


def with_channels_last(problem: Problem, which: Callable[[Any], bool]) -> Problem:
    """The problem with the second axis of some inputs as their last."""

    def moved(x):
        return np.moveaxis(x, 1, -1) if which(x) else x

    return dataclasses.replace(problem, inputs=jax.tree.map(moved, problem.inputs))


def _move(*, inputs: bool, outputs: bool) -> str:
    call = f"model({'jnp.moveaxis(x, 1, -1)' if inputs else 'x'})"
    if outputs:
        call = f"jnp.moveaxis({call}, -1, 1)"
    return f"Move the axes in the function, or with call=lambda model, x: {call}"


def _is_square(x: Any) -> bool:
    """True if x may be an image whose shape is the same with its channels last."""
    return _is_image(x) and channels_last(x.shape) == tuple(x.shape)


def _results(problem: Problem) -> Results | None:
    """Zeros in the shapes of the JAX side's results; None if it cannot be traced."""
    try:
        return JaxSide(problem).shapes(problem)[0]
    except Exception:  # a model may raise anything
        return None


def _is_image(x: Any) -> bool:
    """True if x is a real array with enough axes to have channels."""
    return getattr(x, "ndim", 0) in ORDERS and jnp.issubdtype(x.dtype, jnp.floating)
