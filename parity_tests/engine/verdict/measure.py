"""Measures the JAX side of a problem against any reference."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from parity_tests.engine.bounds.rounded_constants import (
    are_moved,
    digits_of,
    find_moves,
    named_by_number,
    names_of,
    note_on_constants,
    rounded_count,
)
from parity_tests.engine.bounds.tolerance import FLOAT64, Error, tensor_errors
from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.logits import logits_array, logits_error
from parity_tests.engine.problem import DTYPES, Problem
from parity_tests.engine.progress import Say, silent
from parity_tests.engine.references.reference import Reference
from parity_tests.engine.results import (
    GROUPS,
    ErrorsByGroup,
    Results,
    errors_of,
    largest_by_group,
    only_floating,
)
from parity_tests.engine.verdict.faults import dtype_faults, mismatches, notes_on
from parity_tests.engine.verdict.report import Report


class Explanation(NamedTuple):
    """What constants that are rounded to float32 explain in float64."""

    expected: Results
    """The results to compare with."""
    moved: ErrorsByGroup
    """How far each tensor moves if the constants without known float64 digits change."""
    moves: Sequence[np.ndarray] = ()
    """The relative changes of the reference's constants that were made."""
    note: str = ""


def measure(
    problem: Problem,
    reference: Reference,
    dtypes: Iterable[str] = DTYPES,
    platform: str = "cpu",
    *,
    jax_side: JaxSide | None = None,
    keep_arrays: bool = False,
    say: Say = silent,
) -> Report:
    """Measures the errors of both sides in each dtype, and compares JAX's errors with their bounds.

    Dtypes that the problem does not have are skipped. A given `jax_side` is reused, even if it was
    compiled for other weights and inputs, which must have the same shapes. With `keep_arrays`, each
    error of the report holds the arrays of both sides. `say` is called with a few words about each
    run, to show the progress.
    """
    jax_side = jax_side or JaxSide(problem, platform)
    tensors, faults, notes, logits, moves = {}, [*reference.faults], [], {}, ()
    oracle, sides = reference.oracle, reference.sides
    place = logits_array(problem.logits, oracle) if problem.logits and not faults else None
    for dtype in [dtype for dtype in dtypes if dtype in problem.dtypes and not faults]:
        own_run = reference.runs.own(dtype)
        say(f"JAX in {dtype}")
        ours = jax_side.run(problem, dtype, oracle, reference.cast_to)
        facts = jax_side.facts[dtype]

        # Errors can be computed only if both sides return results of the same names and shapes.
        if mismatch_faults := own_run.overflows or mismatches(oracle, ours, sides):
            faults += mismatch_faults
            continue
        faults += dtype_faults(own_run.dtypes, facts, dtype, sides)

        # The bound in float64 is far below the rounding of float32, so make an allowance for the
        # parts of a model that have only float32's precision: operations that cannot run in
        # float64, and rounded constants.
        say(f"the errors in {dtype}")
        bound_dtype = "float32" if dtype == "float64" and facts.coarse_operations else dtype
        expected, moved = oracle, {}
        if bound_dtype == "float64" and not agree_in_float64(ours, oracle):
            expected, moved, moves, note = explain_by_constants(
                problem, jax_side, reference, ours, platform
            )
            notes += [note] if note else []
        own, errors = reference.runs.own(bound_dtype).errors, errors_of(ours, expected)
        tensors[dtype] = {
            group: tensor_errors(
                jnp.dtype(bound_dtype),
                torch=own[group],
                jax=errors[group],
                torch32=reference.runs.own("float32").errors[group],
                rounded=(run[group] for run in reference.runs.rounded(bound_dtype)),
                constants=moved.get(group, {}),
            )
            for group in GROUPS
            if only_floating(oracle.get(group, {})) and group in ours
        }
        if keep_arrays:
            reference_arrays = expected if dtype == "float64" else reference.runs.results_in(dtype)
            tensors[dtype] = with_arrays(tensors[dtype], reference_arrays, ours)

        # For logits, add errors in the units of language models.
        if place and own_run.logits:
            group, name = place
            error = logits_error(ours[group][name], oracle[group][name])
            logits[dtype] = dict(zip(sides, (own_run.logits, error), strict=True))
        del ours, expected  # before the next dtype's results need memory
    if not reference.faults:
        notes += [*reference.notes, *notes_on(jax_side.facts, sides)]
    return Report(
        tensors,
        tuple(dict.fromkeys(faults)),
        tuple(notes),
        logits=logits,
        twin=reference.name,
        platform=platform,
        sides=sides,
        constant_moves=tuple(moves),
    )


def with_arrays(
    errors: Mapping[str, Mapping[str, Error]], reference_arrays: Results, jax_arrays: Results
) -> dict[str, dict[str, Error]]:
    """The errors by group and name, each with the arrays of both sides."""
    return {
        group: {
            name: dataclasses.replace(
                error,
                torch_array=reference_arrays.get(group, {}).get(name),
                jax_array=jax_arrays[group][name],
            )
            for name, error in named.items()
        }
        for group, named in errors.items()
    }


def explain_by_constants(
    problem: Problem, jax_side: JaxSide, reference: Reference, ours: Results, platform: str
) -> Explanation:
    """What constants explain of the differences in float64, and which results to expect instead."""
    oracle, held = reference.oracle, jax_side.constants_of(problem)
    count = reference.constant_count + rounded_count(held)
    if not count:
        return Explanation(oracle, {})
    other, model = reference.sides
    names = [f"{other}'s {name}" for name in reference.constant_names]
    names += [f"{model}'s {name}" for name in names_of(named_by_number(held))]
    note = note_on_constants(count, names)

    # Run the reference again with JAX's float64 digits of its constants, where JAX computes them.
    constants, weights = [*reference.constants.values()], problem.state_dict.values()
    found = find_moves(constants, held, jax_side.argument_free(problem), weights)
    moves, expected = (), oracle
    if are_moved(found.to_digits):
        moves, expected = found.to_digits, reference.with_constants(found.to_digits)
    is_hidden = reference.constant_count > 0 and not constants  # in a record
    is_unknown = is_hidden or are_moved(found.by_rounding)
    are_known = not is_unknown and not are_moved(found.in_model)
    if are_known or agree_in_float64(ours, expected, GROUPS[:2]):
        return Explanation(expected, {}, moves, f"{note} with {model}'s digits in their place")

    # The float64 digits of the other constants are unknown, so change these constants by as much as
    # their rounding, on the side that has them. A result that does not move gets no allowance.
    runs = []
    if is_unknown:
        moves = found.with_rounding
        runs.append(reference.moved_results(moves, expected))
    if are_moved(found.in_model):
        side = JaxSide(problem, platform, digits=digits_of(held, found.in_model))
        runs.append(errors_of(side.run(problem, "float64", oracle, reference.cast_to), ours))
    note += ", where it depends on them, only as closely as float32 allows"
    return Explanation(expected, largest_by_group(runs), moves, note)


def notes_on_arguments(
    problem: Problem, reference: Reference, report: Report, jax_side: JaxSide
) -> Iterator[str]:
    """Notes on arguments of torch's functions with whose other values the two sides would agree."""
    failing = [group for dtype, group, _ in report.failures if dtype == "float64"]
    # The backward pass of some functions keeps the value of the forward pass.
    failing = [group for group in failing if group in GROUPS[:2]] or failing
    if failing:
        for description, results in reference.with_other_arguments():
            ours = jax_side.run(problem, "float64", results, reference.cast_to)
            if agree_in_float64(ours, results, failing):
                name, _ = reference.sides
                yield f"in float64, both sides agree if {name} computes {description}"


def agree_in_float64(ours: Results, oracle: Results, groups: Iterable[str] = GROUPS) -> bool:
    """True if all tensors of these groups agree within the bound of float64."""
    errors = errors_of(ours, oracle)
    return all(error <= FLOAT64 for group in groups for error in errors.get(group, {}).values())
