"""Finds the submodule in which two sides first depart, and describes it for the report.

Both sides run, and each call of a submodule is recorded. The calls are paired and compared. The
culprit is the call that computes wrong arrays from right ones (`rule.py`).
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from parity_tests.engine.bounds.tolerance import floor
from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.locate.evidence import DEPARTS, MATCHED, Evidence, wanted_values
from parity_tests.engine.locate.gates import gates_that_depart
from parity_tests.engine.locate.location import Location, Visit
from parity_tests.engine.locate.pairs import pair_calls
from parity_tests.engine.locate.rule import Culprit, Rule
from parity_tests.engine.locate.search import Search, watch_jax
from parity_tests.engine.problem import Problem
from parity_tests.engine.results import Results
from parity_tests.engine.traces.frameworks import nnx_modules, recording
from parity_tests.engine.traces.held_weights import find_held_weights
from parity_tests.engine.traces.hyperparameters import hyperparameter_differences
from parity_tests.engine.traces.reference_trace import ReferenceTrace
from parity_tests.engine.traces.trace import BACKWARD, FORWARD, Call, Trace


def checked_names(
    names: Mapping[str, str], submodules: Collection[str] | None, model: Any
) -> Mapping[str, str]:
    """Checks that `names` pairs existing submodules, on each side whose submodules are known.

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
                existing = ", ".join(filter(None, known)) or "there are none"
                raise ValueError(f"names: expected {side} submodules ({existing}), got {name!r}")
    return names


def find_departure(
    problem: Problem,
    reference: ReferenceTrace,
    names: Mapping[str, str],
    bound: float = 0.0,
    *,
    is_forward: bool = False,
) -> Location:
    """Runs the JAX side call by call, and compares its calls with those of the reference.

    `names` gives the JAX paths of the reference's submodules that are not paired automatically. An
    error up to `bound` counts as agreement. With `is_forward`, only the forward pass is searched,
    because its results already differ.
    """
    # Run JAX once. This records each call of a JAX module, and searches for torch's arrays among
    # all arrays that JAX computes.
    root = reference.trace.root
    wanted = wanted_values(reference.trace)
    search = Search([*wanted.values()])
    jax_trace = watch_jax(problem, reference, search.see, is_forward=is_forward)
    search.finish()

    # Pair the calls of both sides, without those that JAX only traces, as to learn their shapes.
    find_held_weights(problem, jax_trace, reference.owners)
    min_bound = max(bound, floor(jnp.dtype(reference.dtype)))
    computed = [c for c in jax_trace.calls if c.slots["inputs"] or c.slots["outputs"]]
    pairs = pair_calls(reference.trace.calls, computed, names, min_bound)
    pairs[root] = [jax_trace.root]

    # Apply the rule to the forward pass and, if all its results agree, to the backward pass. Start
    # in the call of the whole module, if the run consists of this call alone.
    for direction in (FORWARD,) if is_forward else (FORWARD, BACKWARD):
        evidence = Evidence(reference, jax_trace, pairs, wanted, min_bound, direction)
        if not {*evidence.states[root, direction.outgoing].values()} <= {MATCHED}:
            outermost = [call for call in reference.trace.calls if call.parent is root]
            frame = outermost[0] if [call.name for call in outermost] == [""] else root
            return departure(problem, evidence, Rule(problem, evidence).culprit(frame))
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


def departure(problem: Problem, evidence: Evidence, culprit: Culprit) -> Location:
    """The report of the first departure."""
    # List the compared calls up to the culprit, except those inside a call that is right.
    direction, trace = evidence.direction, evidence.trace
    visits = []
    for call in _calls_to_report(evidence):
        states = (evidence.state(call, slot) for slot in (direction.incoming, direction.outgoing))
        if not any(evidence.is_right(outer) for outer in call.ancestors):
            visits.append(_visit(evidence, call, DEPARTS in states))
        if call is culprit.before or (call is culprit.call and not culprit.candidates):
            break
    if culprit.candidates:
        candidates = dict.fromkeys(_title(trace, call) for call in culprit.candidates)
        remarks, name = [f"(it may be in {' or '.join(candidates)})"], None
        verdict = f"not known, {direction.name}, in {_title(trace, culprit.call)}"
    else:
        remarks, name = [*_hyperparameters(evidence, culprit.call)], culprit.call.name
        remarks += gates_that_depart(problem, evidence, culprit.call)
        verdict = f"{_title(trace, culprit.call)}, {direction.name}"
    # The backward pass visits the calls in reverse order, so say that "after" means after it.
    of = "the backward pass of " if direction is BACKWARD else ""
    for word, call in (("after", culprit.after), ("before", culprit.before)):
        verdict += f", {word} {of}{_title(trace, call)}" if call is not None else ""
    return Location(evidence.reference.dtype, tuple(visits), name, verdict, tuple(remarks))


def nothing_departs(evidence: Evidence, *, is_forward: bool) -> Location:
    """The report if all numbers that were compared agree: a dtype may still differ."""
    reference, pairs = evidence.reference, evidence.pairs
    visits: list[Visit] = []
    verdict, culprit = "none, all that was compared agrees", None
    results, jax_results = (t.root.slots["outputs"] for t in (evidence.trace, evidence.jax_trace))
    if results.keys() != jax_results.keys():
        visits = [_visit(evidence, call, False) for call in _calls_to_report(evidence)]
        verdict = "the module itself, by the structure of its results"
        return Location(reference.dtype, tuple(visits), "", verdict)
    for call in _calls_to_report(evidence):
        (jax_inputs, torch_inputs), (jax_outputs, torch_outputs) = (
            ({*pairs[call][0].dtypes[slot].values()}, reference.dtypes(call, slot))
            for slot in (FORWARD.incoming, FORWARD.outgoing)
        )
        visits.append(_visit(evidence, call, False))
        if jax_inputs <= torch_inputs and not jax_outputs <= torch_outputs:
            remark = f"{', '.join(sorted(jax_outputs))}, not {', '.join(sorted(torch_outputs))}"
            visits[-1] = dataclasses.replace(visits[-1], departs=True, remark=remark)
            verdict, culprit = f"{call.name or 'the module itself'}, by its dtype", call.name
            break
    else:
        if not visits and len(evidence.trace.calls) > 2:
            verdict = "not known, no submodule could be compared with anything"
        elif is_forward:
            verdict = "not known, forward, no submodule is further off than rounding explains"
    return Location(reference.dtype, tuple(visits), culprit, verdict)


def _calls_to_report(evidence: Evidence) -> list[Call]:
    """The calls that have counterparts, in the order in which they return."""

    def in_order_of_return(call: Call) -> Iterator[Call]:
        for each in evidence.trace.calls_inside(call, evidence.direction):
            yield from in_order_of_return(each)
        yield call

    *calls, _ = in_order_of_return(evidence.trace.root)
    return [call for call in calls if call in evidence.pairs]


def _visit(evidence: Evidence, call: Call, departs: bool) -> Visit:
    errors, layouts = [], []
    for slot in (evidence.direction.incoming, evidence.direction.outgoing):
        found = evidence.differences.get((call, slot), {}).values()
        errors.append(max((d.error for d in found), default=None))
        layouts += [d.layout for d in found if d.layout]
    numbers = _number(evidence.trace, call)
    return Visit(
        call.name,
        evidence.pairs[call][0].name,
        errors[0],
        errors[1],
        departs,
        remark=", ".join({*layouts}),
        number=None if numbers is None else numbers[0],
    )


def _hyperparameters(evidence: Evidence, culprit: Call) -> Iterator[str]:
    """The hyperparameters in which the culprit and its JAX counterpart differ."""
    for counterpart in evidence.pairs.get(culprit, [])[:1]:
        found = [*hyperparameter_differences(culprit.hyperparameters, counterpart.hyperparameters)]
        if found:
            yield f"{culprit.kind} | {counterpart.kind}: {', '.join(found)}"


def _title(trace: Trace, call: Call) -> str:
    """The name of a call's submodule, with the call's number if the submodule has several calls."""
    if not call.name:
        return "the module itself"
    numbers = _number(trace, call)
    return call.name if numbers is None else f"{call.name} in call {numbers[0]} of {numbers[1]}"


def _number(trace: Trace, call: Call) -> tuple[int, int] | None:
    """The number of a call and of all calls of its submodule; None if there are no others."""
    calls = [each for each in trace.calls if each.name and each.name == call.name]
    return (calls.index(call) + 1, len(calls)) if len(calls) > 1 else None
