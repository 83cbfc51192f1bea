"""Run both sides call by call, compare the calls, and say which departs first."""

from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from parity_tests.engine.bounds.tolerance import floor
from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.locate.blame import find
from parity_tests.engine.locate.comparison import Comparison
from parity_tests.engine.locate.evidence import BACKWARD, FORWARD
from parity_tests.engine.locate.frameworks import nnx_modules, recording
from parity_tests.engine.locate.location import Location
from parity_tests.engine.locate.match import paired
from parity_tests.engine.locate.record import Trace
from parity_tests.engine.locate.run import of_jax
from parity_tests.engine.locate.theirs import Theirs
from parity_tests.engine.locate.verdict import departure, nothing_departs
from parity_tests.engine.locate.weights import weigh
from parity_tests.engine.problem import Problem
from parity_tests.engine.results import Results


def checked_names(
    names: Mapping[str, str], submodules: Collection[str] | None, model: Any
) -> Mapping[str, str]:
    """The JAX paths of the reference's submodules, all of which exist if it is known which do.

    Raises:
        TypeError: it is no mapping.
        ValueError: there is no such submodule.

    """
    if not isinstance(names, Mapping):
        raise TypeError(f"names: expected a dict of torch names to JAX paths, got {names!r:.100}")
    ours = [name for name, _ in nnx_modules(model)] if isinstance(model, nnx.Module) else None
    for side, given, known in (
        ("torch", names.keys(), submodules),
        ("JAX", names.values(), ours),
    ):
        paths = given if known is None else known
        for name in given:
            if name not in paths:
                raise ValueError(
                    f"names: expected {side} submodules of "
                    f"{', '.join(filter(None, paths)) or 'a module that has none'}, got {name!r}"
                )
    return names


def find_departure(
    problem: Problem,
    theirs: Theirs,
    names: Mapping[str, str],
    bound: float = 0.0,
    *,
    is_forward: bool = False,
) -> Location:
    """Run the JAX side call by call, and compare it with what the reference tells.

    `names` has the JAX paths of the reference's submodules that correspond for no other reason. An
    error up to `bound` is none, whatever rounding explains. `is_forward`: results depart, which no
    culprit backward explains.
    """
    oracle = theirs.run
    ours = of_jax(problem, theirs.dtype, oracle.results.forward if is_forward else oracle.results)
    weigh(problem, ours.trace, theirs.owners)
    pairs = paired(oracle.trace.calls, ours.trace.calls, names)
    pairs[oracle.whole] = [ours.whole]
    least = max(bound, floor(jnp.dtype(theirs.dtype)))
    comparison = Comparison(problem, theirs, ours, pairs, least)
    for direction in (FORWARD,) if is_forward else (FORWARD, BACKWARD):
        evidence = comparison.evidence(direction)
        if find(oracle.trace, direction, evidence) is None:
            continue
        comparison.search(direction, evidence)
        if (blame := find(oracle.trace, direction, evidence)) is not None:
            return departure(comparison, direction, evidence, blame)
    return nothing_departs(comparison, is_forward)


def where_it_raises(problem: Problem, dtype: str, oracle: Results) -> str | None:
    """The JAX path of the innermost module in which the JAX side raises; None if in none."""
    trace = Trace()
    with recording(trace, problem) as side:
        try:
            JaxSide(side).run(side, dtype, oracle)
        except Exception:
            return trace.open[-1].name if trace.open else None
    return None
