"""Inputs where functions have kinks: exact zeros, ties, extremes, masks of all or nothing."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
import torch

from parity_tests.engine.frameworks import is_floating
from parity_tests.engine.jax_side import JaxSide
from parity_tests.engine.problem import Problem, is_flag
from parity_tests.engine.torch_module import twin_in
from parity_tests.engine.torch_reference import measure_twin
from parity_tests.engine.torch_side import run_oracle

LARGE = 1024.0
"""Beyond what exp can take of usual inputs, in float64 too."""

FLOATING: dict[str, Callable[[np.random.Generator, np.ndarray], np.ndarray]] = {
    "zeros": lambda rng, x: np.zeros_like(x),
    "zeros among others": lambda rng, x: np.where(rng.random(x.shape) < 0.5, 0, x),
    "ties": lambda rng, x: np.round(x),
    "extremes": lambda rng, x: LARGE * x,
}
ALL_HIDDEN = "masks all false"
"""What is left then is nobody's definition: a difference is told, and is no fault."""
OTHERS: dict[str, tuple[Any, Any]] = {
    "the largest integers, masks all true": (
        lambda n: np.full_like(n, n.max(initial=0)),
        np.ones_like,
    ),
    "the smallest integers, masks true at the first place alone": (
        lambda n: np.full_like(n, n.min(initial=0)),
        lambda n: np.broadcast_to(np.arange(n.shape[-1] if n.ndim else 1) == 0, n.shape),
    ),
    ALL_HIDDEN: (lambda n: n, np.zeros_like),
}
"""What becomes of integers, and of masks, which are of booleans or of 0 and 1."""
NUDGE = 1e-9


def edge_problems(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """The problem with other inputs of the same shapes, by what they are."""
    arrays = [leaf for leaf in jax.tree.leaves(problem.inputs) if not is_flag(leaf)]
    if any(np.issubdtype(array.dtype, np.inexact) for array in arrays):
        for name, change in FLOATING.items():
            rng = np.random.default_rng(problem.seed)
            yield name, with_floating(problem, partial(change, rng))
        if problem.to_torch is not None:
            zeros = with_floating(problem, np.zeros_like)
            yield (
                "zeros, biases zero",
                dataclasses.replace(zeros, twin=without_biases(problem.twin)),
            )
    if not all(np.issubdtype(array.dtype, np.inexact) for array in arrays):
        for name, (of_integers, of_masks) in OTHERS.items():
            change_all = partial(_of_integers, of_integers, of_masks)
            yield name, with_inputs(problem, lambda array: not is_floating(array), change_all)


def _of_integers(of_integers: Any, of_masks: Any, n: np.ndarray) -> np.ndarray:
    return (of_masks if is_mask(n) else of_integers)(n).astype(n.dtype)


def is_mask(array: np.ndarray) -> bool:
    """Has it booleans, or nothing but 0 and 1?"""
    return array.dtype == bool or bool(np.isin(array, (0, 1)).all())


def with_floating(problem: Problem, change: Callable[[np.ndarray], np.ndarray]) -> Problem:
    """The problem with its floating inputs changed."""
    return with_inputs(problem, is_floating, change)


def with_inputs(
    problem: Problem,
    which: Callable[[np.ndarray], bool],
    change: Callable[[np.ndarray], np.ndarray],
) -> Problem:
    """The problem with some of its inputs changed."""

    def leaf(array: Any) -> Any:
        return change(array) if not is_flag(array) and which(array) else array

    return dataclasses.replace(problem, inputs=jax.tree.map(leaf, problem.inputs))


def is_picked(problem: Problem) -> bool:
    """Does torch pick one of several equals, by a sort, say: another one of inputs hardly moved?"""
    rng = np.random.default_rng(problem.seed)

    def nudged(x: np.ndarray) -> np.ndarray:
        return x + NUDGE * rng.standard_normal(x.shape)

    picks = []
    for each in (problem, with_floating(problem, nudged)):
        _, mode = run_oracle(each)
        picks.append([d for d in mode.decisions if d.dtype != torch.bool])
    return len(picks[0]) != len(picks[1]) or not all(map(torch.equal, *picks))


def without_biases(twin: torch.nn.Module) -> torch.nn.Module:
    """A copy whose biases are zero, so that zeros stay zeros on their way."""
    twin = twin_in(twin, "float64")
    with torch.no_grad():
        for name, weight in twin.named_parameters():
            if "bias" in name.rpartition(".")[2]:
                weight.zero_()
    return twin


def measure_edges(
    problem: Problem, platform: str, jax_side: JaxSide
) -> tuple[list[str], list[str]]:
    """What differs at the edges in float64, each a fault, and what was compared there."""
    faults, compared, told = [], [], []
    for name, edge in edge_problems(problem):
        try:
            report = measure_twin(edge, ["float64"], platform, jax_side=jax_side)
        except Exception as error:  # a module may refuse such inputs
            told.append(f"edge inputs, {name}: not compared, {type(error).__name__}")
            continue
        if not report.errors and any("torch side are not finite" in f for f in report.faults):
            told.append(f"edge inputs, {name}: not compared, torch's results are not finite")
            continue
        compared.append(name)
        found = [f"edge inputs, {name}: {fault}" for fault in report.faults]
        found += [
            f"edge inputs, {name}: {group} differ by {error.jax:.1e}, where {error.bound:.1e} is "
            f"allowed, worst in {error.tensor}"
            for _, group, error in report.failures
            if error.verdict == "FAIL"
        ]
        if found and name == ALL_HIDDEN:
            told += found
        elif found and is_picked(edge):
            told += [f"{fault}; torch picks one of several equals there" for fault in found]
        else:
            faults += found
    return faults, [f"edge inputs were compared: {'; '.join(compared) or 'none'}", *told]
