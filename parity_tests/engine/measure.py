"""Measure the JAX side of a problem against any reference."""

from collections.abc import Iterable

import jax.numpy as jnp

from parity_tests.engine.bounds.rounded_constants import (
    moves_to,
    names_of,
    numbered,
    rounded_count,
)
from parity_tests.engine.bounds.tolerance import FLOAT64, Error, tensor_errors
from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.faults import mismatches, notes_on, other_dtypes
from parity_tests.engine.logits import logits_array, logits_error
from parity_tests.engine.problem import DTYPES, Problem
from parity_tests.engine.progress import Say, silent
from parity_tests.engine.references.reference import Reference
from parity_tests.engine.report import Report
from parity_tests.engine.results import (
    GROUPS,
    Results,
    errors_of,
    only_floating,
)

MOST_NAMES = 3
"""The largest number of constants that a note names."""


def measure(
    problem: Problem,
    reference: Reference,
    dtypes: Iterable[str] = DTYPES,
    platform: str = "cpu",
    *,
    jax_side: JaxSide | None = None,
    say: Say = silent,
) -> Report:
    """Measure the errors in each of these dtypes that the problem has.

    `jax_side` may have been compiled for a problem with other weights and inputs of the same
    shapes. `say` receives a line about what runs.
    """
    jax_side = jax_side or JaxSide(problem, platform)
    tensors, faults, notes, logits = {}, [*reference.faults], [], {}
    oracle, sides = reference.oracle, reference.sides
    place = logits_array(problem.logits, oracle) if problem.logits and not faults else None
    chosen = [dtype for dtype in dtypes if dtype in problem.dtypes and not faults]
    for dtype in chosen:
        theirs = reference.own_run(dtype)
        say(f"JAX in {dtype}")
        ours = jax_side.run(problem, dtype, oracle, reference.cast_to)
        if in_kind := theirs.overflows or mismatches(oracle, ours, sides):
            faults += in_kind
            continue
        faults += other_dtypes(theirs.dtypes, jax_side.found[dtype], dtype, sides)
        say(f"the errors in {dtype}")
        in_dtype, expected, may_scatter = dtype, oracle, True
        if dtype == "float64" and jax_side.found[dtype].stays:
            in_dtype = "float32"
        elif dtype == "float64" and not _are_equal(ours, oracle):
            constants = Constants(problem, jax_side, reference)
            if constants.count:
                expected, in_dtype, how = _explained(constants, ours, oracle)
                # Random rounding moves every number, which allows more than rounded constants do.
                may_scatter = in_dtype == "float64"
                notes.append(f"{constants}: float64 is compared {how}")
        tensors[dtype] = _errors(reference, in_dtype, ours, expected, may_scatter)
        del expected
        if place and theirs.logits:
            group, name = place
            error = logits_error(ours[group][name], oracle[group][name])
            logits[dtype] = dict(zip(sides, (theirs.logits, error), strict=True))
        del ours  # so that it is not in memory beside the next dtype's results
    if not reference.faults:
        notes += [*reference.notes, *notes_on(jax_side.found, sides)]
    return Report(
        tensors,
        tuple(dict.fromkeys(faults)),
        tuple(notes),
        logits=logits,
        twin=reference.name,
        platform=platform,
        sides=sides,
    )


class Constants:
    """The constants of both sides that are rounded to float32."""

    def __init__(self, problem: Problem, jax_side: JaxSide, reference: Reference):
        self._problem, self._jax_side, self._reference = problem, jax_side, reference
        self._ours = jax_side.constants_of(problem)
        self.count = reference.constant_count + rounded_count(self._ours)

    def __str__(self) -> str:
        """How many there are, and some of their names."""
        theirs, ours = self._reference.sides
        named = [f"{theirs}'s {name}" for name in self._reference.constant_names]
        named += [f"{ours}'s {name}" for name in names_of(numbered(self._ours))]
        more = f" and {len(named) - MOST_NAMES} more" if len(named) > MOST_NAMES else ""
        are = "constant is" if self.count == 1 else "constants are"
        return f"{self.count} {are} in float32 ({', '.join(named[:MOST_NAMES])}{more})"

    def with_digits(self) -> tuple[Results | None, bool]:
        """The results with JAX's digits in the reference's constants, and whether JAX has all.

        The results are None if the reference cannot be run with other constants.
        """
        arrays = self._jax_side.argument_free(self._problem)
        moves, have_own = moves_to(self._reference.constants.values(), arrays)
        are_known = have_own and bool(moves) and not rounded_count(self._ours)
        if not any(move.any() for move in moves):
            return self._reference.oracle, are_known
        return self._reference.with_constants(moves), are_known


def _are_equal(ours: Results, oracle: Results, groups: Iterable[str] = GROUPS) -> bool:
    errors = errors_of(ours, oracle)
    return all(error <= FLOAT64 for group in groups for error in errors.get(group, {}).values())


def _explained(constants: Constants, ours: Results, oracle: Results) -> tuple[Results, str, str]:
    """The results to compare float64 with, the dtype whose bound applies, and words for a note."""
    expected, are_known = constants.with_digits()
    if expected is not None and (are_known or _are_equal(ours, expected, GROUPS[:2])):
        return expected, "float64", "with JAX's digits in their place"
    return oracle, "float32", "only as closely as float32 allows"


def _errors(
    reference: Reference,
    dtype: str,
    ours: Results,
    oracle: Results,
    may_scatter: bool,
) -> dict[str, dict[str, Error]]:
    """The errors of each group's tensors; random rounding may raise their bounds."""
    theirs = reference.own_run(dtype).errors
    theirs32 = reference.own_run("float32").errors
    errors = errors_of(ours, oracle)
    return {
        group: tensor_errors(
            jnp.dtype(dtype),
            ours=errors[group],
            theirs=theirs[group],
            theirs32=theirs32[group],
            rounded=(run[group] for run in (reference.rounded(dtype) if may_scatter else ())),
        )
        for group in GROUPS
        if only_floating(oracle.get(group, {})) and group in ours
    }
