"""Measures how the errors grow along a sequence.

The error of a step is the root mean square over batch and features, relative to that of the float64
twin's output at the same step, as `tolerance` defines it for tensors. Because each step has its own
scale, outputs that grow do not hide the errors of earlier steps.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from parity_tests.engine.bounds.tolerance import relative_errors
from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.candidates.torch_run import run_oracle, run_torch
from parity_tests.registry import Case
from parity_tests.report.record import ErrorOverTime

STEPS = 128


def errors_over_time(case: Case, platform: str) -> Iterator[ErrorOverTime]:
    """Runs both sides over `STEPS` steps, or as many as the layer takes."""
    x = case.inputs(time=min(STEPS, case.max_length or STEPS))
    problem = dataclasses.replace(case.problem(given_state=False), inputs=(x,))
    oracle, jax_side = run_oracle(problem)[0].forward, JaxSide(problem, platform)
    for dtype in (dtype for dtype in case.dtypes if dtype != "float64"):
        torch, jax = (
            by_step(results["outputs"]["y"], oracle["outputs"]["y"])
            for results in (run_torch(problem, dtype), jax_side.run(problem, dtype, oracle))
        )
        yield ErrorOverTime(case.name, platform, dtype, torch, jax)


def by_step(y: np.ndarray, oracle: np.ndarray) -> tuple[float, ...]:
    """The relative error at each step, to three digits."""
    errors = (
        relative_errors({"y": y[:, t]}, {"y": oracle[:, t]})["y"] for t in range(oracle.shape[1])
    )
    return tuple(float(f"{error:.3g}") for error in errors)
