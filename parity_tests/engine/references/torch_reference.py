"""Use a torch module as the reference."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Self

import jax
import numpy as np
import torch

from jax_models.weights.trees import path_of
from parity_tests.engine.bounds.rounded_constants import is_rounded
from parity_tests.engine.bounds.tolerance import ROUNDED_RUNS
from parity_tests.engine.candidates.model_weights import ReferenceWeights
from parity_tests.engine.candidates.torch_module import weight_owners
from parity_tests.engine.candidates.torch_run import (
    Prepare,
    affects_result,
    result_dtypes,
    run_oracle,
    run_torch,
    run_torch_rounded,
)
from parity_tests.engine.problem import Problem, state_dict_arrays
from parity_tests.engine.progress import Say, silent
from parity_tests.engine.references.reference import Reference, ResultKey
from parity_tests.engine.results import (
    GROUPS,
    ErrorsByGroup,
    Results,
    are_same,
    errors_of,
    not_finite,
)
from parity_tests.engine.traces.reference_trace import ReferenceTrace, trace_of_runs
from parity_tests.engine.traces.torch_trace import run_again, trace_torch
from parity_tests.engine.traces.trace import Trace


class TorchReference(Reference):
    """A torch module that serves as the reference."""

    def __init__(self, twin: torch.nn.Module):
        self.twin, self.name = twin, type(twin).__name__
        parameters = [name for name, _ in twin.named_parameters(remove_duplicate=False)]
        arrays, owners = state_dict_arrays(twin.state_dict()), weight_owners(twin)
        self.weights = ReferenceWeights(arrays, owners, parameters, affects_result)
        self.submodules = [name for name, _ in twin.named_modules()]

    def run(self, problem: Problem, say: Say = silent) -> Self:
        """Run the problem's torch side in float64."""
        self.problem, self._say, self._moves = problem, say, {}
        say("torch in float64")
        self.oracle, self._mode = run_oracle(problem)
        self.cast_to = sorted(self._mode.cast_to)
        self.faults = [*not_finite(self.oracle, "float64 torch"), *self._randomness()]
        self.notes = []
        if self._mode.casts:
            self.notes.append(
                f"torch casts to less than float64, {self._mode.casts} times: float64 is compared "
                "without these casts"
            )
        if "input gradient" not in self.oracle:
            self.notes.append("gradients are not compared: no output of the torch side has one")
        return self

    def _randomness(self) -> list[str]:
        """A fault if the results depend on the random seed."""
        draws = ", ".join(sorted(self._mode.draws))
        other = dataclasses.replace(self.problem, seed=self.problem.seed + 1)
        if not draws or are_same(self.oracle, run_oracle(other)[0]):
            return []
        return [
            f"torch: the results are random, by {draws}: compare without, or give both sides the "
            "same random numbers"
        ]

    def _results_in(self, dtype: str) -> Results:
        return run_torch(self.problem, dtype)

    def _dtypes_in(self, dtype: str, results: Results) -> Mapping[ResultKey, Any]:
        if dtype == "float64" and self.cast_to:
            return result_dtypes(self.problem, dtype)
        named = ((group, results.get(group, {})) for group in GROUPS[:2])
        return {(group, name): a.dtype for group, arrays in named for name, a in arrays.items()}

    def _rounded(self, dtype: str) -> Iterator[ErrorsByGroup]:
        self._say(f"torch, rounded to {dtype} at random")
        run = partial(run_torch_rounded, self.problem, dtype, decisions=self._mode.decisions)
        yield from (errors_of(run(seed), self.oracle) for seed in range(ROUNDED_RUNS))

    def trace(self, dtype: str, *, is_forward: bool = False) -> ReferenceTrace:
        """The reference's calls in float64, and how far rounding to a dtype moves their arrays."""
        self._say("torch in float64, call by call")
        problem, decisions = self.problem, self._mode.decisions
        traced = partial(trace_torch, problem, is_forward=is_forward)

        def rounded() -> Iterator[Trace]:
            for seed in range(ROUNDED_RUNS):
                yield traced(partial(run_torch_rounded, problem, dtype, seed, decisions))

        def moved() -> Iterator[Trace]:
            if self._moves:  # twice as far as to JAX's digits, so that these are within the bound
                twice = {name: 2 * move for name, move in self._moves.items()}
                yield traced(partial(run_with_moved_constants, problem, moves=twice))

        return trace_of_runs(
            dtype,
            self._traced_oracle(is_forward=is_forward),
            self.weights.owners,
            lambda: traced(partial(run_torch, problem, dtype)),
            rounded(),
            moved(),
            partial(run_again, problem),
        )

    @functools.cached_property
    def _traced_oracle(self) -> Callable[..., Trace]:
        """The traced run in float64, which all dtypes share."""
        run = partial(run_with_moved_constants, self.problem)
        return functools.cache(partial(trace_torch, self.problem, run))

    @functools.cached_property
    def constants(self) -> Mapping[str, np.ndarray]:
        """The twin's constants that are rounded to float32, by name."""
        constants = {
            name: tensor.detach().double().numpy()
            for name, tensor in named_constants(self.problem, self.problem.twin)
        }
        return {name: value for name, value in constants.items() if is_rounded(value).any()}

    def with_constants(self, moves: Sequence[np.ndarray]) -> Results:
        """The float64 results if each constant is scaled by 1 + its move."""
        self._moves = dict(zip(self.constants, moves, strict=True))
        return run_with_moved_constants(self.problem, moves=self._moves)


def named_constants(problem: Problem, twin: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The floating buffers and plain attributes of the twin that JAX does not read, with keys."""
    read_keys = twin.state_dict().keys() - problem.constants
    seen: set[int] = set()
    for path, module in twin.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        plain = {name: value for name, value in vars(module).items() if name[:1] != "_"}
        for attribute, tensor in jax.tree_util.tree_leaves_with_path({**plain, **module._buffers}):
            key = ".".join(filter(None, (path, path_of(attribute))))
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.is_floating_point()
                and not isinstance(tensor, torch.nn.Parameter)
                and key not in read_keys
                and id(tensor) not in seen
            ):
                seen.add(id(tensor))
                yield key, tensor


def run_with_moved_constants(
    problem: Problem,
    prepare: Prepare = lambda twin: None,
    moves: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> Results:
    """The float64 results if the constants that `moves` names are scaled by 1 + their moves.

    `prepare` may change the copy of the twin before it runs.
    """

    def move_constants(twin: torch.nn.Module) -> None:
        with torch.no_grad():
            for name, constant in named_constants(problem, twin) if moves else ():
                if name in moves:
                    constant.mul_(torch.tensor(1 + moves[name]))
        prepare(twin)

    return run_oracle(problem, move_constants)[0]
