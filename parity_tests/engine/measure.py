"""Measure a JAX side against a reference, which knows of no framework."""

from collections.abc import Callable, Iterable, Mapping

import jax.numpy as jnp

from parity_tests.engine.constants import Constants
from parity_tests.engine.faults import mismatches, notes_on, other_dtypes
from parity_tests.engine.jax_side import JaxSide
from parity_tests.engine.logits import logits_array, logits_error
from parity_tests.engine.problem import DTYPES, Problem
from parity_tests.engine.reference import Reference
from parity_tests.engine.report import Report
from parity_tests.engine.results import (
    GROUPS,
    ErrorsByGroup,
    Results,
    errors_of,
    only_floating,
)
from parity_tests.engine.tolerance import FITTED, Error, tensor_errors


def measure(
    problem: Problem,
    reference: Reference,
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
    tensors, faults, notes, logits = {}, [*reference.faults], [], {}
    oracle, sides = reference.oracle, reference.sides
    place = logits_array(problem.logits, oracle) if problem.logits and not faults else None
    chosen = [dtype for dtype in dtypes if dtype in problem.dtypes and not faults]
    for dtype in chosen:
        theirs = reference.said(dtype)
        say(f"JAX in {dtype}")
        ours = jax_side.run(problem, dtype, oracle, reference.cast_to)
        if in_kind := theirs.overflows or mismatches(oracle, ours, sides):
            faults += in_kind
            continue
        faults += other_dtypes(theirs.dtypes, jax_side.found[dtype], dtype, sides)
        say(f"the errors in {dtype}")
        stays = dtype == "float64" and bool(jax_side.found[dtype].stays)
        compared = _Compared(reference, "float32" if stays else dtype)
        tensors[dtype] = compared.errors(ours, oracle)
        if compared.dtype == "float64" and not all(
            error.passed for named in tensors[dtype].values() for error in named.values()
        ):
            constants = Constants(problem, jax_side, reference)
            if constants.count:
                tensors[dtype] = compared.errors_by(constants, ours)
                notes.append(
                    f"{constants.count} constants are in float32: float64 is compared as if they "
                    "were those, within their rounding, that bring the sides closest"
                )
        if place and theirs.logits:
            group, name = place
            error = logits_error(ours[group][name], oracle[group][name])
            logits[dtype] = dict(zip(sides, (theirs.logits, error), strict=True))
    if not reference.faults:
        notes += [*reference.notes, *notes_on(jax_side, sides)]
    return Report(
        tensors,
        tuple(dict.fromkeys(faults)),
        tuple(notes),
        logits=logits,
        twin=reference.name,
        platform=platform,
        sides=sides,
    )


class _Compared:
    """The reference in a dtype, to measure results against."""

    def __init__(self, reference: Reference, dtype: str):
        self.reference, self.dtype = reference, dtype

    def errors(
        self,
        ours: Results,
        oracle: Results,
        least: Mapping[str, Mapping[str, float]] | None = None,
    ) -> dict[str, dict[str, Error]]:
        """The errors of each group's tensors; `least` are bounds that something else explains."""
        theirs = self.reference.said(self.dtype).errors
        theirs32 = self.reference.said("float32").errors
        errors = errors_of(ours, oracle)
        return {
            group: tensor_errors(
                jnp.dtype(self.dtype),
                ours=errors[group],
                theirs=theirs[group],
                theirs32=theirs32[group],
                scatter=lambda group=group: self.reference.scatter(self.dtype)[group],
                least=(least or {}).get(group),
            )
            for group in GROUPS
            if only_floating(oracle.get(group, {})) and group in ours
        }

    def errors_by(self, constants: Constants, ours: Results) -> dict[str, dict[str, Error]]:
        """The errors where constants that are rounded to float32 explain some of them."""
        scatter: ErrorsByGroup = constants.scatter(ours)
        fitted = constants.fitted(ours)
        if fitted is None:
            return self.errors(ours, self.reference.oracle, scatter)
        oracle, ours = fitted
        least = {
            group: {name: FITTED * error for name, error in named.items()}
            for group, named in scatter.items()
        }
        return self.errors(ours, oracle, least)
