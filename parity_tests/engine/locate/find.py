"""Run both sides call by call, compare the calls, and say which departs first."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import torch
from flax import nnx

from parity_tests.engine.jax_side import JaxSide
from parity_tests.engine.locate.blame import (
    BACKWARD,
    FORWARD,
    find,
)
from parity_tests.engine.locate.comparison import Comparison
from parity_tests.engine.locate.frameworks import nnx_modules, recording
from parity_tests.engine.locate.location import Location
from parity_tests.engine.locate.match import paired
from parity_tests.engine.locate.record import Trace
from parity_tests.engine.locate.run import of_jax, of_torch
from parity_tests.engine.locate.weights import weigh
from parity_tests.engine.problem import Problem
from parity_tests.engine.tolerance import floor
from parity_tests.engine.torch_side import run_oracle


def checked_names(
    names: Mapping[str, str] | None, twin: torch.nn.Module, model: Any
) -> Mapping[str, str]:
    """The JAX paths of torch submodules, all of which exist.

    Raises:
        TypeError: it is no mapping.
        ValueError: there is no such submodule.

    """
    if names is None:
        return {}
    if not isinstance(names, Mapping):
        raise TypeError(f"names: expected a dict of torch names to JAX paths, got {names!r:.100}")
    known = [("torch", names.keys(), [name for name, _ in twin.named_modules()])]
    if isinstance(model, nnx.Module):
        known += [("JAX", names.values(), [name for name, _ in nnx_modules(model)])]
    for side, given, paths in known:
        for name in given:
            if name not in paths:
                raise ValueError(
                    f"names: expected {side} submodules of "
                    f"{', '.join(filter(None, paths)) or 'a module that has none'}, got {name!r}"
                )
    return names


def find_departure(
    problem: Problem,
    dtype: str,
    names: Mapping[str, str],
    bound: float = 0.0,
    *,
    is_forward: bool = False,
) -> Location:
    """Run both sides call by call in a dtype, the torch module in float64 beside them.

    `names` has the JAX paths of torch submodules that correspond for no other reason. An error up
    to `bound` is none, whatever rounding explains. `is_forward`: results depart, which no culprit
    backward explains.
    """
    oracle = of_torch(problem, lambda problem: run_oracle(problem)[0])
    ours = of_jax(problem, dtype, oracle.results)
    weigh(problem, ours.trace)
    pairs = paired(oracle.trace.calls, ours.trace.calls, names)
    pairs[oracle.whole] = [ours.whole]
    least = max(bound, floor(jnp.dtype(dtype)))
    comparison = Comparison(problem, dtype, oracle, ours, pairs, least)
    for direction in (FORWARD,) if is_forward else (FORWARD, BACKWARD):
        evidence = comparison.evidence(direction)
        if find(oracle.trace, direction, evidence) is None:
            continue
        comparison.search(direction, evidence)
        if (blame := find(oracle.trace, direction, evidence)) is not None:
            return comparison.location(direction, evidence, blame)
    return comparison.nothing_departs(is_forward)


def where_it_raises(problem: Problem, dtype: str) -> str | None:
    """The JAX path of the innermost module in which the JAX side raises; None if in none."""
    trace = Trace()
    with recording(trace, problem) as side:
        try:
            JaxSide(side).run(side, dtype, run_oracle(problem)[0])
        except Exception:
            return trace.open[-1].name if trace.open else None
    return None
