"""Prepares torch contenders, so that they can be timed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.problem import FORWARD, Call, Function, Problem
from benchmarks.workers import Prepared


def prepare(
    solution: Function | Call, problem: Problem, part: str
) -> tuple[Callable[[], Any], int, Prepared]:
    """A function to time, the number of repetitions in one call, and the result."""
    if isinstance(solution, Call):
        return solution.call, solution.parts, Prepared(None, None, solution.first())
    leaves = {
        name: x if isinstance(x, torch.Tensor) else torch.tensor(x, requires_grad=True)
        for name, x in solution.params.items()
    }
    wait = torch.cuda.synchronize if torch.get_default_device().type == "cuda" else lambda: None

    def forward():
        with torch.no_grad():
            y = solution.apply(leaves)
        wait()
        return y

    if part == FORWARD:
        return forward, 1, Prepared(None, None, {"y": _numpy(forward())})
    cotangent = torch.tensor(problem.cotangent())

    def both():
        for leaf in leaves.values():
            leaf.grad = None
        y = solution.apply(leaves)
        y.backward(cotangent)
        wait()
        return y

    arrays = {"y": _numpy(both())}
    gradients = solution.named({name: leaf.grad for name, leaf in leaves.items()})
    arrays |= {name: _numpy(g) for name, g in gradients.items()}
    return both, 1, Prepared(None, None, arrays)


def _numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().cpu().numpy()
