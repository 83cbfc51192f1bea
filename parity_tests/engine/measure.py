"""Measure a torch module and its JAX port against the torch module in float64."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import jax.numpy as jnp
import numpy as np
import torch

from parity_tests.engine.constants import Constants
from parity_tests.engine.faults import (
    mismatches,
    not_a_number,
    notes_on,
    other_dtypes,
    overflows,
    random_results,
)
from parity_tests.engine.logits import logits_array, logits_error
from parity_tests.engine.problem import DTYPES, Problem
from parity_tests.engine.report import Report
from parity_tests.engine.rounding import InFloat64
from parity_tests.engine.run import (
    GROUPS,
    JaxSide,
    Results,
    largest_by_group,
    only_floating,
    result_dtypes,
    run_oracle,
    run_torch,
    run_torch_rounded,
)
from parity_tests.engine.tolerance import FITTED, ROUNDED_RUNS, Error, tensor_errors


def measure(
    problem: Problem,
    dtypes: Iterable[str] = DTYPES,
    platform: str = "cpu",
    *,
    jax_side: JaxSide | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """The errors in those of the dtypes that the problem has.

    `jax_side` may be that of a problem with other weights and inputs of the same shapes. `say` is
    told what runs.
    """
    jax_side = jax_side or JaxSide(problem, platform)
    say("torch in float64")
    oracle, mode = run_oracle(problem)
    report = partial(Report, twin=type(problem.twin).__name__, platform=platform)
    faults = [*not_a_number(oracle, "float64"), *random_results(problem, oracle, mode)]
    if faults:
        return report({}, tuple(faults))
    group_of_logits = logits_array(problem.logits, oracle) if problem.logits else None
    say("torch in float32")
    torch32 = run_torch(problem, "float32")
    known = {"float64": oracle, "float32": torch32}
    tensors, logits, notes = {}, {}, []
    chosen = [dtype for dtype in dtypes if dtype in problem.dtypes]
    for dtype in chosen:
        theirs = known[dtype] if dtype in known else run_torch(problem, dtype)
        say(f"JAX in {dtype}")
        try:
            ours = jax_side.run(problem, dtype, oracle, sorted(mode.cast_to))
        except Exception as error:  # whatever the JAX side says of x64, if that is the reason
            if dtype != "float64" or "float32" not in chosen:
                raise
            try:
                jax_side.run(problem, "float32", oracle)
            except Exception:
                raise error from None
            notes.append(
                f"float64 is not compared: with JAX's x64, the JAX side raises {error!r:.200}"
            )
            continue
        if in_kind := overflows(oracle, theirs, dtype) or mismatches(oracle, ours):
            faults += in_kind
            continue
        compared = _Compared(problem, dtype, oracle, theirs, torch32, mode)
        faults += other_dtypes(compared.dtypes_of_torch(), jax_side.found[dtype], dtype)
        say(f"the errors in {dtype}")
        if dtype == "float64" and jax_side.found[dtype].stays:
            compared = dataclasses.replace(compared, dtype="float32", theirs=torch32)
        tensors[dtype] = compared.errors(ours)
        if compared.dtype == "float64" and not all(
            error.passed for named in tensors[dtype].values() for error in named.values()
        ):
            constants = Constants(problem, jax_side, oracle, sorted(mode.cast_to))
            if constants.count:
                tensors[dtype] = compared.errors_by(constants, ours)
                notes.append(
                    f"{constants.count} constants are in float32: float64 is compared as if they "
                    "were those, within their rounding, that bring the sides closest"
                )
        if group_of_logits:
            group, name = group_of_logits
            logits[dtype] = {
                side: logits_error(results[group][name], oracle[group][name])
                for side, results in (("torch", theirs), ("JAX", ours))
            }
    notes += notes_on(oracle, mode, jax_side)
    return report(tensors, tuple(dict.fromkeys(faults)), tuple(notes), logits=logits)


@dataclasses.dataclass
class _Compared:
    """A dtype's results, to be measured."""

    problem: Problem
    dtype: str
    oracle: Results
    theirs: Results
    torch32: Results
    mode: InFloat64

    def dtypes_of_torch(self) -> dict[tuple[str, str], np.dtype]:
        """The dtypes of the torch side's results, by group and name."""
        if self.dtype == "float64" and self.mode.cast_to:
            return result_dtypes(self.problem, self.dtype)
        return {
            (group, name): array.dtype
            for group in GROUPS[:2]
            for name, array in self.theirs.get(group, {}).items()
        }

    def errors(
        self, ours: Results, least: Mapping[str, Mapping[str, float]] | None = None
    ) -> dict[str, dict[str, Error]]:
        """The errors of each group's tensors; `least` are bounds that something else explains."""
        scatter = Scatter(self.problem, self.dtype, self.mode.decisions, self.oracle)
        return {
            group: tensor_errors(
                jnp.dtype(self.dtype),
                oracle=compared,
                torch=only_floating(self.theirs[group]),
                jax=only_floating(ours[group]),
                torch32=only_floating(self.torch32[group]),
                scatter=partial(scatter.of, group),
                negligible="gradient" in group,
                least=(least or {}).get(group),
            )
            for group in GROUPS
            if (compared := only_floating(self.oracle.get(group, {}))) and group in ours
        }

    def errors_by(self, constants: Constants, ours: Results) -> dict[str, dict[str, Error]]:
        """The errors where constants that are rounded to float32 explain some of them."""
        scatter = largest_by_group(constants.scatter(ours))
        fitted = constants.fitted(ours)
        if fitted is None:
            return self.errors(ours, scatter)
        oracle, ours = fitted
        closest = dataclasses.replace(self, oracle=oracle, theirs=oracle)
        least = {
            group: {name: FITTED * error for name, error in named.items()}
            for group, named in scatter.items()
        }
        return closest.errors(ours, least)


@dataclasses.dataclass
class Scatter:
    """The torch side with random rounding, run when it is first asked for."""

    problem: Problem
    dtype: str
    decisions: list[torch.Tensor]
    oracle: Results

    def of(self, group: str) -> dict[str, float]:
        """The largest error of each tensor of a group."""
        return self._errors[group]

    @functools.cached_property
    def _errors(self) -> dict[str, dict[str, float]]:
        return largest_by_group(
            (run_torch_rounded(self.problem, self.dtype, seed, self.decisions), self.oracle)
            for seed in range(ROUNDED_RUNS)
        )
