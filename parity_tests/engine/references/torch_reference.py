"""Uses a torch module as the reference."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Self

import jax
import numpy as np
import torch

from jax_models.weights.trees import path_of
from parity_tests.engine.bounds.rounded_constants import is_rounded
from parity_tests.engine.bounds.torch_functions import other_arguments
from parity_tests.engine.bounds.torch_rounding import InFloat64
from parity_tests.engine.candidates.model_weights import ReferenceWeights
from parity_tests.engine.candidates.torch_run import (
    Prepare,
    affects_result,
    forward,
    run_oracle,
    run_torch,
    run_torch_rounded,
    weight_owners,
)
from parity_tests.engine.problem import Arrays, Problem, state_dict_arrays
from parity_tests.engine.progress import Say, silent
from parity_tests.engine.references.reference import Reference, ResultKey, Run, Runs
from parity_tests.engine.results import GROUPS, Results, are_same, not_finite
from parity_tests.engine.traces.torch_trace import run_again, trace_torch, trace_with
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
        """Runs the problem's torch side in float64."""
        self.problem, self.runs = problem, Runs(self, say)
        self.run_again, self.trace_with = partial(run_again, problem), partial(trace_with, problem)
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

    def results(self, run: Run, prepare: Prepare = lambda twin: None) -> Results:
        def move_and_prepare(twin: torch.nn.Module) -> None:
            moves = dict(zip(self.constants, run.moves, strict=True)) if run.moves else {}
            with torch.no_grad():
                for name, constant in named_constants(self.problem, twin) if moves else ():
                    constant.mul_(torch.tensor(1 + moves.get(name, 0.0)))
            prepare(twin)

        if run.seed is not None:
            decisions = self._mode.decisions
            return run_torch_rounded(self.problem, run.dtype, run.seed, decisions, prepare)
        if run.dtype:
            return run_torch(self.problem, run.dtype, prepare)
        return run_oracle(self.problem, move_and_prepare)[0]

    def with_other_arguments(self) -> Iterator[tuple[str, Results]]:
        """The float64 results with other arguments of torch's functions, and which they are."""
        for other in other_arguments(self._mode.functions):
            results, _ = run_oracle(self.problem, mode=InFloat64(other.replace))
            if other.description:
                yield other.description, results

    def forward_with(self, weights: Arrays) -> Results:
        """The float64 results of the forward pass if other weights replace some of its own."""

        def replace(twin: torch.nn.Module) -> None:
            tensors = twin.state_dict()
            for key, array in weights.items():
                tensors[key].copy_(torch.tensor(array))

        return forward(self.problem, replace)

    def trace(self, run: Run, *, is_forward: bool = False) -> Trace:
        return trace_torch(self.problem, partial(self.results, run), is_forward=is_forward)

    def dtypes_in(self, dtype: str, results: Results) -> Mapping[ResultKey, Any]:
        if dtype == "float64" and self.cast_to:
            try:  # with its own casts
                results = self.results(Run(dtype))
            except RuntimeError:  # float64 arrays may meet arrays that the module casts
                return {}
        named = ((group, results.get(group, {})) for group in GROUPS[:2])
        return {(group, name): a.dtype for group, arrays in named for name, a in arrays.items()}

    @functools.cached_property
    def constants(self) -> Mapping[str, np.ndarray]:
        """The twin's constants that are rounded to float32, by name."""
        constants = {
            name: tensor.detach().double().numpy()
            for name, tensor in named_constants(self.problem, self.twin)
        }
        return {name: value for name, value in constants.items() if is_rounded(value).any()}


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
