"""Compiles JAX contenders, so that they can be timed."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.problem import FORWARD, Call, Function, Problem
from benchmarks.workers import Prepared


def prepare(
    solution: Function | Call, problem: Problem, part: str
) -> tuple[Callable[[], Any], int, Prepared]:
    """A function to time, the number of repetitions in one call, and the result."""
    return (
        prepare_call(solution)
        if isinstance(solution, Call)
        else prepare_function(solution, problem, part)
    )


def prepare_call(solution: Call) -> tuple[Callable[[], Any], int, Prepared]:
    """Prepares a call. The time to compile is that of the first call minus that of the second."""
    start = time.perf_counter()
    result = solution.first()
    middle = time.perf_counter()
    solution.call()
    seconds = (middle - start) - (time.perf_counter() - middle)
    return solution.call, solution.parts, Prepared(max(0.0, seconds), None, result)


def prepare_function(
    solution: Function, problem: Problem, part: str
) -> tuple[Callable[[], Any], int, Prepared]:
    """Prepares a function, compiled ahead of time for this part of the problem."""

    def both(params, cotangent):
        y, pullback = jax.vjp(solution.apply, params)
        return y, *pullback(cotangent)

    arguments = [jax.device_put(solution.params)]
    if part != FORWARD:
        arguments.append(jax.device_put(problem.cotangent()))
    start = time.perf_counter()
    compiled = jax.jit(solution.apply if part == FORWARD else both).lower(*arguments).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    sizes = (getattr(memory, f"{kind}_size_in_bytes") for kind in ("argument", "output", "temp"))
    result = compiled(*arguments)
    y, gradients = (result, {}) if part == FORWARD else (result[0], solution.named(result[1]))
    arrays = {"y": np.asarray(y)} | {name: np.asarray(g) for name, g in gradients.items()}
    call = lambda: jax.block_until_ready(compiled(*arguments))  # noqa: E731
    return call, 1, Prepared(seconds, sum(sizes), arrays)
