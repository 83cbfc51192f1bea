"""Measure a torch module and its JAX port against the torch module in float64."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from functools import partial

import jax.numpy as jnp
import numpy as np
import torch

from parity_tests.engine.locate import Location
from parity_tests.engine.logits import LogitsError, logits_array, logits_error, logits_lines
from parity_tests.engine.problem import DTYPES, Arrays, Problem
from parity_tests.engine.run import (
    GROUPS,
    JaxSide,
    Results,
    only_floating,
    run_oracle,
    run_torch,
    run_torch_rounded,
)
from parity_tests.engine.tolerance import ROUNDED_RUNS, Error, tensor_errors, worst


@dataclasses.dataclass(frozen=True)
class Report:
    """How far the JAX port and the torch module are from the torch module in float64.

    `tensors` are the errors by dtype, group and tensor; `faults` are what no error can say, each a
    failure; `notes` are what was not compared.
    """

    tensors: dict[str, dict[str, dict[str, Error]]]
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    location: Location | None = None
    """Where a failing pair first departs, if that was asked for."""
    logits: dict[str, dict[str, LogitsError]] = dataclasses.field(default_factory=dict)
    """By dtype and side, if that was asked for."""
    twin: str = ""
    """The class of the torch module."""
    platform: str = "cpu"
    """Where JAX ran."""

    @functools.cached_property
    def errors(self) -> dict[str, dict[str, Error]]:
        """By dtype and group: the error of the tensor that takes most of its bound."""
        return {
            dtype: {group: worst(named) for group, named in groups.items()}
            for dtype, groups in self.tensors.items()
        }

    @property
    def failures(self) -> Iterator[tuple[str, str, Error]]:
        """The dtype, group and error of each that is over its bound."""
        for dtype, groups in self.errors.items():
            yield from ((dtype, group, e) for group, e in groups.items() if not e.passed)

    @property
    def passed(self) -> bool:
        """Was something compared, and is all of it equal?"""
        return bool(self.errors) and not self.faults and not any(self.failures)

    def __str__(self) -> str:
        """A table, and what is wrong."""
        lines = [*self._rows(failing=False), *self._faults, *(f"note: {n}" for n in self.notes)]
        lines += logits_lines(self.logits)
        lines += [] if self.location is None else [f"\n{self.location}"]
        return "\n".join(lines)

    @property
    def short(self) -> str:
        """The rows that fail, what else is wrong, and where the pair first departs."""
        lines = [*(self._rows(failing=True) if any(self.failures) else ()), *self._faults]
        lines += [] if self.location is None else str(self.location).splitlines()[-1:]
        return "\n".join(lines)

    def table(self, worst: int = 20) -> str:
        """The tensors that take most of their bounds, a line each."""
        errors = [
            (dtype, group, error)
            for dtype, groups in self.tensors.items()
            for group, named in groups.items()
            for error in named.values()
        ]
        errors.sort(key=lambda row: row[2].share, reverse=True)
        rows = (f"{_row(*row)}{row[2].share:9.3g}  {row[2].tensor}" for row in errors[:worst])
        return "\n".join([f"{HEAD}{'/ bound':>9}", *rows])

    def _rows(self, *, failing: bool) -> Iterator[str]:
        yield HEAD
        for dtype, groups in self.errors.items():
            for group, e in groups.items():
                if not (failing and e.passed):
                    verdict = "pass" if e.passed else f"{e.verdict}, worst in {e.tensor}"
                    unstable = ", unstable reference" if e.unstable else ""
                    yield f"{_row(dtype, group, e)}  {verdict}{unstable}"

    @property
    def _faults(self) -> list[str]:
        return [f"FAIL: {fault}" for fault in self.faults]


HEAD = f"{'':9}{'':18}{'torch':>9}{'JAX':>9}{'ratio':>9}{'bound':>9}"


def _row(dtype: str, group: str, e: Error) -> str:
    ratio = "–" if e.ratio is None else f"{e.ratio:.3g}"
    return f"{dtype:9}{group:18}{e.torch:9.1e}{e.jax:9.1e}{ratio:>9}{e.bound:9.1e}"


def measure(
    problem: Problem,
    dtypes: Iterable[str] = DTYPES,
    platform: str = "cpu",
    *,
    jax_side: JaxSide | None = None,
) -> Report:
    """The errors in those of the dtypes that the problem has.

    `jax_side` may be that of a problem with other weights and inputs of the same shapes.
    """
    jax_side = jax_side or JaxSide(problem, platform)
    oracle, mode = run_oracle(problem)
    report = partial(Report, twin=type(problem.twin).__name__, platform=platform)
    if faults := _not_finite(oracle, "float64"):
        return report({}, tuple(faults))
    group_of_logits = logits_array(problem.logits, oracle) if problem.logits else None
    torch32 = run_torch(problem, "float32")
    torch64 = run_torch(problem, "float64") if mode.casts else oracle
    known = {"float64": torch64, "float32": torch32}
    tensors, logits = {}, {}
    for dtype in (dtype for dtype in dtypes if dtype in problem.dtypes):
        theirs = known[dtype] if dtype in known else run_torch(problem, dtype)
        ours = jax_side.run(problem, dtype, oracle)
        if mismatches := _not_finite(theirs, dtype) or _mismatches(oracle, ours, dtype):
            faults += mismatches
            continue
        scatter = Scatter(problem, dtype, mode.decisions)
        tensors[dtype] = {
            group: tensor_errors(
                jnp.dtype(dtype),
                oracle=compared,
                torch=only_floating(theirs[group]),
                jax=only_floating(ours[group]),
                torch32=only_floating(torch32[group]),
                scatter=partial(scatter.of, group),
                negligible="gradient" in group,
            )
            for group in GROUPS
            if (compared := only_floating(oracle.get(group, {}))) and group in ours
        }
        if group_of_logits:
            group, name = group_of_logits
            logits[dtype] = {
                side: logits_error(results[group][name], oracle[group][name])
                for side, results in (("torch", theirs), ("JAX", ours))
            }
    note = (
        f"torch casts to less than float64, {mode.casts} times: a fault that is smaller than what "
        "it errs there cannot be told from rounding"
    )
    notes = (note,) if mode.casts else ()
    return report(tensors, tuple(dict.fromkeys(faults)), notes, logits=logits)


@dataclasses.dataclass
class Scatter:
    """The torch side with random rounding, run when it is first asked for."""

    problem: Problem
    dtype: str
    decisions: list[torch.Tensor]

    def of(self, group: str) -> list[Arrays]:
        """The group's tensors in each run."""
        return [only_floating(run[group]) for run in self._runs]

    @functools.cached_property
    def _runs(self) -> list[Results]:
        return [
            run_torch_rounded(self.problem, self.dtype, seed, self.decisions)
            for seed in range(ROUNDED_RUNS)
        ]


def _not_finite(results: Results, dtype: str) -> list[str]:
    return [
        f"{group}, {name}: {count} of {array.size} numbers of the {dtype} torch side are not finite"
        for group, named in results.items()
        for name, array in named.items()
        if (count := np.count_nonzero(~np.isfinite(array)))
    ]


def _mismatches(oracle: Results, ours: Results, dtype: str) -> list[str]:
    """What is wrong in kind with our results."""
    faults = []
    if not any(like.size for like in oracle.get("outputs", {}).values()):
        faults.append("outputs: all of them are empty, there is nothing to compare")
    for group in GROUPS[:2]:
        expected, actual = oracle.get(group, {}), ours.get(group, {})
        if expected.keys() != actual.keys():
            faults.append(f"{group}: torch returns {[*expected]}, JAX {[*actual]}")
            continue
        for name, like in expected.items():
            array = actual[name]
            if array.shape != like.shape:
                fault = f"shape {like.shape} in torch, {array.shape} in JAX"
            elif only_floating({"": array}).keys() != only_floating({"": like}).keys():
                fault = f"{like.dtype} in torch, {array.dtype} in JAX"
            elif not only_floating({"": like}) and (count := np.count_nonzero(array != like)):
                fault = f"{count} of {array.size} {like.dtype} differ"
            elif dtype == "float64" and only_floating({"": array}) and array.dtype != np.float64:
                fault = f"JAX computes in {array.dtype} where float64 was asked for"
            else:
                continue
            faults.append(f"{group}, {name}: {fault}")
    return faults
