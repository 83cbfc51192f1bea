"""Measure a torch module and its JAX port against the torch module in float64."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from parity_tests.engine.casts import Found, is_library
from parity_tests.engine.constants import Constants, bounds_of_scatter
from parity_tests.engine.locate import Location
from parity_tests.engine.problem import COMPLEX, DTYPES, Problem
from parity_tests.engine.rounding import InFloat64
from parity_tests.engine.run import (
    GROUPS,
    JaxSide,
    Results,
    only_floating,
    result_dtypes,
    run_oracle,
    run_torch,
    run_torch_rounded,
)
from parity_tests.engine.tolerance import FITTED, ROUNDED_RUNS, Error, group_error, relative_errors


@dataclasses.dataclass(frozen=True)
class Report:
    """How far the JAX port and the torch module are from the torch module in float64.

    `errors` are by dtype and group; `faults` are what no error can say, each a failure; `notes` are
    what was not compared.
    """

    errors: dict[str, dict[str, Error]]
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    location: Location | None = None
    """Where a failing pair first departs, if that was asked for."""

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
        lines = [f"{'':9}{'':18}{'torch':>9}{'JAX':>9}{'ratio':>9}{'bound':>9}"]
        for dtype, groups in self.errors.items():
            for group, e in groups.items():
                ratio = "–" if e.ratio is None else f"{e.ratio:.3g}"
                verdict = "pass" if e.passed else f"{e.verdict}, worst in {e.tensor}"
                unstable = ", unstable reference" if e.unstable else ""
                lines.append(
                    f"{dtype:9}{group:18}{e.torch:9.1e}{e.jax:9.1e}{ratio:>9}{e.bound:9.1e}  "
                    f"{verdict}{unstable}"
                )
        lines += [f"FAIL: {fault}" for fault in self.faults]
        lines += [f"note: {note}" for note in self.notes]
        if self.location is not None:
            lines.append(f"\n{self.location}")
        return "\n".join(lines)


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
    faults = [*_nan(oracle, "float64"), *_random(problem, oracle, mode)]
    if faults:
        return Report({}, tuple(faults))
    say("torch in float32")
    torch32 = run_torch(problem, "float32")
    known = {"float64": oracle, "float32": torch32}
    errors, notes = {}, []
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
        if mismatches := _overflows(oracle, theirs, dtype) or _mismatches(oracle, ours):
            faults += mismatches
            continue
        compared = _Compared(problem, dtype, oracle, theirs, torch32, mode)
        faults += _dtype_faults(compared.dtypes_of_torch(), jax_side.found[dtype], dtype)
        say(f"the errors in {dtype}")
        if dtype == "float64" and jax_side.found[dtype].stays:
            compared = dataclasses.replace(compared, dtype="float32", theirs=torch32)
        errors[dtype] = compared.errors(ours)
        if compared.dtype == "float64" and not all(
            error.passed for error in errors[dtype].values()
        ):
            constants = Constants(problem, jax_side, oracle, sorted(mode.cast_to))
            if constants.count:
                errors[dtype] = compared.errors_by(constants, ours)
                notes.append(
                    f"{constants.count} constants are in float32: float64 is compared as if they "
                    "were those, within their rounding, that bring the sides closest"
                )
    notes += _notes(oracle, mode, jax_side)
    return Report(errors, tuple(dict.fromkeys(faults)), tuple(notes))


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
    ) -> dict[str, Error]:
        """The error of each group; `least` are bounds that something else explains."""
        scatter = Scatter(self.problem, self.dtype, self.mode.decisions, self.oracle)
        return {
            group: group_error(
                jnp.dtype(self.dtype),
                oracle=compared,
                torch=only_floating(self.theirs[group]),
                jax=only_floating(ours[group]),
                torch32=only_floating(self.torch32[group]),
                scatter_errors=partial(scatter.of, group),
                negligible="gradient" in group,
                least=(least or {}).get(group),
            )
            for group in GROUPS
            if (compared := only_floating(self.oracle.get(group, {}))) and group in ours
        }

    def errors_by(self, constants: Constants, ours: Results) -> dict[str, Error]:
        """The errors where constants that are rounded to float32 explain some of them."""

        def relative(group: str, moved: Results, unmoved: Results) -> dict[str, float]:
            tensors = (only_floating(results[group]) for results in (moved, unmoved))
            return relative_errors(*tensors, negligible="gradient" in group)

        scatter = [*constants.scatter(ours)]
        fitted = constants.fitted(ours)
        if fitted is None:
            return self.errors(ours, bounds_of_scatter(iter(scatter), relative, 1.0))
        oracle, ours = fitted
        closest = dataclasses.replace(self, oracle=oracle, theirs=oracle)
        return closest.errors(ours, bounds_of_scatter(iter(scatter), relative, FITTED))


def _notes(oracle: Results, mode: InFloat64, jax_side: JaxSide) -> Iterator[str]:
    """What float64 ran without, what stays in less, and what was not compared."""
    if mode.casts:
        yield (
            f"torch casts to less than float64, {mode.casts} times: float64 is compared without "
            "these casts"
        )
    found = jax_side.found.get("float64")
    if found is not None and found.casts:
        yield (
            f"JAX casts to less than float64: float64 is compared without these casts: "
            f"{'; '.join(found.casts)}"
        )
    if found is not None and found.stays:
        yield (
            "JAX computes in less than float64 whatever it is given, so that a fault below that "
            f"rounding cannot be told: {'; '.join(dict.fromkeys(found.stays))}"
        )
    draws = dict.fromkeys(place for each in jax_side.found.values() for place in each.draws)
    if draws:
        yield f"JAX draws random numbers, which are not torch's: {'; '.join(draws)}"
    if any(each.padding for each in jax_side.found.values()):
        yield (
            "torch drops the gradient of an embedding's padding_idx and JAX does not: these rows "
            "are not compared"
        )
    if "input gradient" not in oracle:
        yield "gradients are not compared: no output of the torch side has one"


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
        largest: dict[str, dict[str, float]] = {group: {} for group in GROUPS}
        for seed in range(ROUNDED_RUNS):
            run = run_torch_rounded(self.problem, self.dtype, seed, self.decisions)
            for group in run:
                errors = relative_errors(
                    only_floating(run[group]),
                    only_floating(self.oracle[group]),
                    negligible="gradient" in group,
                )
                for name, error in errors.items():
                    largest[group][name] = max(error, largest[group].get(name, 0.0))
        return largest


def _nan(results: Results, dtype: str) -> list[str]:
    return [
        f"{group}, {name}: {count} of {array.size} numbers of the {dtype} torch side are not finite"
        for group, named in results.items()
        for name, array in named.items()
        if (count := np.count_nonzero(np.isnan(array)))
    ]


def _overflows(oracle: Results, theirs: Results, dtype: str) -> list[str]:
    """Numbers of the torch side that are finite in float64 and not in the dtype."""
    return [
        f"{group}, {name}: {count} of {array.size} numbers of the {dtype} torch side are not finite"
        for group, named in theirs.items()
        for name, array in named.items()
        if (count := np.count_nonzero(~np.isfinite(array) & np.isfinite(oracle[group][name])))
    ]


def _random(problem: Problem, oracle: Results, mode: InFloat64) -> list[str]:
    """Does the torch side give something else with other random numbers?"""
    if not mode.draws:
        return []
    again, _ = run_oracle(dataclasses.replace(problem, seed=problem.seed + 1))
    if all(
        np.array_equal(array, again[group][name], equal_nan=True)
        for group in GROUPS[:2]
        for name, array in oracle.get(group, {}).items()
    ):
        return []
    return [
        f"torch: the results are random, by {', '.join(sorted(mode.draws))}: compare without, or "
        "give both sides the same random numbers"
    ]


def _mismatches(oracle: Results, ours: Results) -> list[str]:
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
            elif kind(array) != kind(like):
                fault = f"{like.dtype} in torch, {array.dtype} in JAX"
            elif not only_floating({"": like}) and (count := np.count_nonzero(array != like)):
                fault = f"{count} of {array.size} {like.dtype} differ"
            else:
                continue
            faults.append(f"{group}, {name}: {fault}")
    return faults


def kind(array: np.ndarray) -> str:
    """What kind of numbers: integers and booleans are one, as in an index."""
    kinds = {"complex": jnp.complexfloating, "real": jnp.floating}
    return next((k for k, t in kinds.items() if jnp.issubdtype(array.dtype, t)), "integer")


def _dtype_faults(theirs: Mapping[Any, Any], found: Found, dtype: str) -> list[str]:
    """Results in another dtype than was asked for, if torch's have not the same.

    In float64 a layer of a framework may have another, as `nnx.Embed` has: nobody asked it. A final
    state may be carried in more.
    """
    asked = {dtype, COMPLEX[dtype]}
    if dtype == "float64" and found.casts and all(map(is_library, found.casts)):
        return []
    return [
        f"{group}, {name}: JAX computes in {actual} where {dtype} was asked for"
        for (group, name), actual in found.dtypes.items()
        if jnp.issubdtype(actual, jnp.inexact)
        and str(actual) not in asked
        and actual != theirs.get((group, name))
        and not (group == "final state" and jnp.finfo(actual).bits > jnp.finfo(dtype).bits)
    ]
