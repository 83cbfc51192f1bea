"""Compiles JAX contenders, so that they can be timed."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.problem import FORWARD, Call, Function, Problem
from benchmarks.workers import Prepared


def prepare(
    made: Function | Call, problem: Problem, part: str
) -> tuple[Callable[[], Any], int, Prepared]:
    """A function to time, the number of repetitions in one call, and the result."""
    return step(made) if isinstance(made, Call) else function(made, problem, part)


def step(made: Call) -> tuple[Callable[[], Any], int, Prepared]:
    """Prepares a call. The time to compile is that of the first call minus that of the second."""
    start = time.perf_counter()
    result = made.result()
    middle = time.perf_counter()
    made.call()
    seconds = (middle - start) - (time.perf_counter() - middle)
    return made.call, made.parts, Prepared(max(0.0, seconds), None, result)


def function(
    made: Function, problem: Problem, part: str
) -> tuple[Callable[[], Any], int, Prepared]:
    """Prepares a function, compiled ahead of time for this part of the problem."""

    def both(params, cotangent):
        y, pullback = jax.vjp(made.apply, params)
        return y, *pullback(cotangent)

    arguments = [jax.device_put(made.params)]
    if part != FORWARD:
        arguments.append(jax.device_put(problem.cotangent()))
    start = time.perf_counter()
    compiled = jax.jit(made.apply if part == FORWARD else both).lower(*arguments).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    sizes = (getattr(memory, f"{kind}_size_in_bytes") for kind in ("argument", "output", "temp"))
    result = compiled(*arguments)
    y, gradients = (result, {}) if part == FORWARD else (result[0], made.named(result[1]))
    arrays = {"y": np.asarray(y)} | {name: np.asarray(g) for name, g in gradients.items()}
    call = lambda: jax.block_until_ready(compiled(*arguments))  # noqa: E731
    return call, 1, Prepared(seconds, sum(sizes), arrays)
