"""Runs of both sides in which each call is kept."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from parity_tests.engine.jax_side import JaxSide
from parity_tests.engine.locate.frameworks import recording
from parity_tests.engine.locate.record import Call, Trace
from parity_tests.engine.locate.torch_side import hooked
from parity_tests.engine.problem import Problem
from parity_tests.engine.results import Results


@dataclasses.dataclass
class Run:
    """A run of one side: its results, its calls, and the call of the whole."""

    results: Results
    trace: Trace
    whole: Call


def of_torch(problem: Problem, run: Callable[[Problem], Results]) -> Run:
    """A run of the torch side."""
    trace = Trace()
    whole = trace.begin("", "run")
    with trace.running(whole):
        results = run(dataclasses.replace(problem, twin=hooked(problem.twin, trace)))
    _note_results(whole, results)
    leaves = jax.tree_util.tree_leaves_with_path(problem.inputs)
    whole.slots["inputs"] = {jax.tree_util.keystr(p): np.asarray(leaf) for p, leaf in leaves}
    return Run(results, trace, whole)


def of_jax(problem: Problem, dtype: str, oracle: Results) -> Run:
    """The run of the JAX side."""
    trace = Trace()
    whole = trace.begin("", "run")
    with recording(trace, problem) as side, trace.running(whole):
        results = JaxSide(side).run(side, dtype, oracle)
    _note_results(whole, results)
    return Run(results, trace, whole)


def _note_results(whole: Call, results: Results) -> None:
    """The result of the run is what the whole gives."""
    for group, slot in (
        ("outputs", "outputs"),
        ("final state", "outputs"),
        ("input gradient", "input gradients"),
    ):
        whole.slots[slot] |= {
            f"{group} {n}": np.array(a) for n, a in results.get(group, {}).items()
        }
