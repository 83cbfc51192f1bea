"""Run both sides call by call, compare the calls, and say which departs first."""

from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from parity_tests.engine.bounds.tolerance import floor
from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.locate.evidence import BACKWARD, FORWARD, MATCHED, Evidence, wanted_values
from parity_tests.engine.locate.frameworks import nnx_modules, recording
from parity_tests.engine.locate.location import Location
from parity_tests.engine.locate.match import paired
from parity_tests.engine.locate.record import Trace
from parity_tests.engine.locate.reference_trace import ReferenceTrace
from parity_tests.engine.locate.report import departure, nothing_departs
from parity_tests.engine.locate.rule import Rule
from parity_tests.engine.locate.run import of_jax
from parity_tests.engine.locate.search import Search, watched
from parity_tests.engine.locate.substitute import Substitution
from parity_tests.engine.locate.weights import weigh
from parity_tests.engine.problem import Problem
from parity_tests.engine.results import Results


def checked_names(
    names: Mapping[str, str], submodules: Collection[str] | None, model: Any
) -> Mapping[str, str]:
    """The JAX paths of the reference's submodules, checked as far as the submodules are known.

    Raises:
        TypeError: `names` is not a mapping.
        ValueError: a submodule does not exist.

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
    reference: ReferenceTrace,
    names: Mapping[str, str],
    bound: float = 0.0,
    *,
    is_forward: bool = False,
) -> Location:
    """Run the JAX side call by call, and compare it with the trace of the reference.

    `names` has the JAX paths of the reference's submodules that are not paired otherwise. An error
    up to `bound` counts as agreement. With `is_forward`, the results already depart, so only the
    forward pass is searched.
    """
    oracle = reference.run
    wanted = wanted_values(oracle.trace)
    search = Search([*wanted.values()])
    jax_run = of_jax(
        problem,
        reference.dtype,
        oracle.results.forward if is_forward else oracle.results,
        reference.cast_to,
        transform=lambda function: watched(function, search.see),
    )
    search.finish()
    weigh(problem, jax_run.trace, reference.owners)
    least = max(bound, floor(jnp.dtype(reference.dtype)))
    pairs = paired(oracle.trace.calls, jax_run.trace.calls, names, least)
    pairs[oracle.whole] = [jax_run.whole]
    for direction in (FORWARD,) if is_forward else (FORWARD, BACKWARD):
        evidence = Evidence(reference, jax_run, pairs, wanted, least, direction)
        if not {*evidence.states[oracle.whole, direction.given].values()} <= {MATCHED}:
            outermost = [call for call in oracle.trace.calls if call.parent is oracle.whole]
            start = outermost[0] if [call.name for call in outermost] == [""] else oracle.whole
            return departure(
                evidence, Rule(evidence, Substitution(problem, evidence)).culprit(start)
            )
    evidence = Evidence(reference, jax_run, pairs, wanted, least, FORWARD)
    return nothing_departs(evidence, is_forward=is_forward)


def where_it_raises(problem: Problem, dtype: str, oracle: Results) -> str | None:
    """The JAX path of the innermost module that raises an error; None if no module does."""
    trace = Trace()
    with recording(trace, problem) as side:
        try:
            JaxSide(side).run(side, dtype, oracle)
        except Exception:
            return trace.open[-1].name if trace.open else None
    return None
