"""Runs of a side in which each call is kept."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.locate.frameworks import recording
from parity_tests.engine.locate.record import Call, Trace
from parity_tests.engine.problem import Problem, is_flag
from parity_tests.engine.results import Results


@dataclasses.dataclass
class Run:
    """A run of one side: its results, its calls, and the call of the whole."""

    results: Results
    trace: Trace
    whole: Call


def of_jax(
    problem: Problem,
    dtype: str,
    oracle: Results,
    cast_to: Sequence[str] = (),
    *,
    rounding: str | None = None,
    noise: int = 0,
    transform: Callable[[Callable], Callable] = lambda function: function,
) -> Run:
    """The run of a JAX side; the arguments are those of `JaxSide` and `JaxSide.run`."""
    trace = Trace()
    whole = trace.begin("", "run")
    with recording(trace, problem) as side, trace.running(whole):
        results = JaxSide(side, rounding=rounding, transform=transform).run(
            side, dtype, oracle, cast_to, noise=noise
        )
    return whole_run(problem, results, trace)


def whole_run(problem: Problem, results: Results, trace: Trace) -> Run:
    """Fill in the first call, that of the whole: it takes the inputs and gives the results."""
    whole = trace.calls[0]
    whole.slots["inputs"] = {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(problem.inputs)
        if not is_flag(leaf)
    }
    for group, slot in (
        ("outputs", "outputs"),
        ("final state", "outputs"),
        ("input gradient", "input gradients"),
    ):
        whole.slots[slot] |= {
            f"{group} {n}": np.array(a) for n, a in results.get(group, {}).items()
        }
    called = {"": whole} | {c.name: c for c in reversed(trace.calls[1:]) if c.kind != "tap"}
    for key, gradient in results.get("weight gradients", {}).items():
        owner = key.rpartition(".")[0]
        while owner and owner not in called:
            owner = owner.rpartition(".")[0]
        called[owner].slots["weight gradients"][key] = np.asarray(gradient)
    return Run(results, trace, whole)
