"""Find the submodule in which two sides first depart.

Both sides run, and each call of a submodule is recorded. The calls are paired and compared. The
culprit is the call that computes wrong arrays from right ones (`rule.py`).
"""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx

from parity_tests.engine.bounds.tolerance import floor
from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.locate.describe import departure, nothing_departs
from parity_tests.engine.locate.evidence import MATCHED, Evidence, wanted_values
from parity_tests.engine.locate.location import Location
from parity_tests.engine.locate.pairs import pair_calls
from parity_tests.engine.locate.rule import Rule
from parity_tests.engine.locate.search import Search, WatchingEvaluator
from parity_tests.engine.locate.substitute import Substitution
from parity_tests.engine.problem import Problem
from parity_tests.engine.results import Results
from parity_tests.engine.traces.frameworks import nnx_modules, recording, trace_jax
from parity_tests.engine.traces.held_weights import find_held_weights
from parity_tests.engine.traces.reference_trace import ReferenceTrace
from parity_tests.engine.traces.trace import BACKWARD, FORWARD, Trace


def checked_names(
    names: Mapping[str, str], submodules: Collection[str] | None, model: Any
) -> Mapping[str, str]:
    """Check that `names` pairs existing submodules, on each side whose submodules are known.

    Raises:
        TypeError: `names` is not a mapping.
        ValueError: a submodule does not exist.

    """
    if not isinstance(names, Mapping):
        raise TypeError(f"names: expected a dict of torch names to JAX paths, got {names!r:.100}")
    modules = [name for name, _ in nnx_modules(model)] if isinstance(model, nnx.Module) else None
    for side, given, known in (("torch", names, submodules), ("JAX", names.values(), modules)):
        for name in given:
            if known is not None and name not in known:
                raise ValueError(
                    f"names: expected {side} submodules of "
                    f"{', '.join(filter(None, known)) or 'a module that has none'}, got {name!r}"
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
    """Run the JAX side call by call, and compare its calls with those of the reference.

    `names` gives the JAX paths of the reference's submodules that are not paired automatically. An
    error up to `bound` counts as agreement. With `is_forward`, only the forward pass is searched,
    because its results already differ.
    """
    # Run JAX once. This records each call of a JAX module, and searches for torch's arrays among
    # all arrays that JAX computes.
    results, root = reference.trace.results, reference.trace.root
    wanted = wanted_values(reference.trace)
    search = Search([*wanted.values()])
    jax_trace = trace_jax(
        problem,
        reference.dtype,
        results.forward if is_forward else results,
        reference.cast_to,
        evaluator=partial(WatchingEvaluator, search.see),
    )
    search.finish()

    # Pair the calls of both sides.
    find_held_weights(problem, jax_trace, reference.owners)
    min_bound = max(bound, floor(jnp.dtype(reference.dtype)))
    pairs = pair_calls(reference.trace.calls, jax_trace.calls, names, min_bound)
    pairs[root] = [jax_trace.root]

    # Apply the rule to the forward pass and, if all its results agree, to the backward pass. Start
    # in the call of the whole module, if the run consists of this call alone.
    for direction in (FORWARD,) if is_forward else (FORWARD, BACKWARD):
        evidence = Evidence(reference, jax_trace, pairs, wanted, min_bound, direction)
        if not {*evidence.states[root, direction.outgoing].values()} <= {MATCHED}:
            outermost = [call for call in reference.trace.calls if call.parent is root]
            frame = outermost[0] if [call.name for call in outermost] == [""] else root
            rule = Rule(evidence, Substitution(problem, evidence))
            return departure(evidence, rule.culprit(frame))
    evidence = Evidence(reference, jax_trace, pairs, wanted, min_bound, FORWARD)
    return nothing_departs(evidence, is_forward=is_forward)


def where_it_raises(problem: Problem, dtype: str, oracle: Results) -> str | None:
    """The JAX path of the innermost module that raises an error; None if no module does."""
    trace = Trace()
    with recording(trace, problem) as side:
        try:
            JaxSide(side).run(side, dtype, oracle)
        except Exception:
            return trace.open_calls[-1].name if trace.open_calls else None
    return None
