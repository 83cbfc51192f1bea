"""Runs the trainings of both sides batch by batch, and compares them."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from parity_tests.engine.bounds.tolerance import (
    ROUNDED_RUNS,
    Error,
    K,
    floor,
    group_error,
    relative_errors,
    rms,
)
from parity_tests.engine.bounds.torch_rounding import InFloat64, RandomRounding
from parity_tests.engine.problem import Arrays
from parity_tests.engine.training.jax_training import JaxTraining
from parity_tests.engine.training.torch_training import MOMENTS, TorchTraining
from parity_tests.engine.training.training_report import TrainingReport
from parity_tests.engine.training.weight_names import Names, select


@contextlib.contextmanager
def x64(enabled: bool) -> Iterator[None]:
    """A context with x64 on or off, as in a user's program in float64 or in another dtype.

    An optimizer that was made with x64 on may request float64 with x64 off. JAX's warning about
    that is ignored.
    """
    with jax.enable_x64(enabled), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Explicitly requested dtype float64", UserWarning)
        yield


def train_side_by_side(
    names: Names,
    sides: Mapping[str, JaxTraining],
    make_torch_training: Callable[..., TorchTraining],
    batches: Sequence[Any],
) -> TrainingReport:
    """Trains both sides batch by batch, and compares them after each batch.

    Args:
        names: gives the weights of both sides the same names.
        sides: JAX's training in each dtype.
        make_torch_training: makes torch's training in a dtype, optionally under an arithmetic mode.
        batches: the batches.

    """
    # The oracle is torch's training in float64, which ignores casts to other dtypes. It also serves
    # as torch's own training in float64.
    arithmetic = InFloat64()
    oracle = make_torch_training("float64", arithmetic)
    own_trainings = {"float64": oracle} | {
        dtype: make_torch_training(dtype) for dtype in {*sides, "float32"} - {"float64"}
    }

    # A training with random rounding takes only as many steps as the verdicts need, often none.
    @functools.cache
    def rounded_training(dtype: str, seed: int) -> TorchTraining:
        return make_torch_training(dtype, RandomRounding(dtype, seed, arithmetic.decisions))

    def scatter(dtype: str, expected: Arrays) -> Iterator[dict[str, float]]:
        """The errors of trainings with random rounding, after the batches so far."""
        for seed in range(ROUNDED_RUNS):
            run = rounded_training(dtype, seed)
            for batch in batches[run.count : oracle.count]:
                run.train_on(batch)
            yield relative_errors(select(run.compared(), expected), expected)

    # Take each batch on all sides, and compare the results with the oracle's.
    after = before = oracle.compared()
    statistics = oracle.weights().keys() - names.trained
    errors: dict[str, list[Error]] = {dtype: [] for dtype in sides}
    norms: dict[str, list[tuple[float, float]]] = {dtype: [] for dtype in sides}
    departures: dict[str, str] = {}
    for batch in batches:
        for training in own_trainings.values():
            training.train_on(batch)
        after, gradient = oracle.compared(), oracle.gradients()
        for dtype, side in sides.items():
            with x64(dtype == "float64"):
                side.train_on(batch)
                found, gradients = side.compared(), side.gradients()
            norms[dtype].append((norm(gradient), norm(select(gradients, gradient))))

            # Compare everything except statistics that JAX's loss does not return.
            skipped = set() if side.returns_statistics else statistics
            expected = select(after, found.keys() - skipped)
            error = group_error(
                jnp.dtype(dtype),
                oracle=expected,
                torch=select(own_trainings[dtype].compared(), expected),
                jax=select(found, expected),
                torch32=select(own_trainings["float32"].compared(), expected),
                rounded=scatter(dtype, expected),
            )
            errors[dtype].append(error)
            if not error.passed and dtype not in departures:
                with x64(dtype == "float64"):
                    departures[dtype] = describe_departure(
                        dtype, oracle, own_trainings[dtype], side
                    )

    # If no weight changed, the comparison shows nothing, which is a fault.
    same = {name for name in after if np.array_equal(after[name], before.get(name, np.nan))}
    faults, notes = [], []
    if names.trained <= same:
        faults.append("training: no weight of the torch side changed, there is nothing to compare")
    if not all(side.returns_statistics for side in sides.values()) and statistics - same:
        notes.append(
            f"not compared: {', '.join(sorted(statistics - same))}, which change: return "
            "`(loss, weights)` from `loss`, with their new values"
        )
    if arithmetic.draws and not is_reproducible(make_torch_training, batches, after):
        faults.append(
            f"training: torch draws random numbers ({', '.join(sorted(arithmetic.draws))}), which "
            "JAX does not get: set dropout to zero, or give both sides the same numbers in the "
            "batch"
        )
    return TrainingReport(
        {dtype: tuple(each) for dtype, each in errors.items()},
        {dtype: tuple(each) for dtype, each in norms.items()},
        tuple(faults),
        tuple(notes),
        departures,
    )


def is_reproducible(
    make_torch_training: Callable[..., TorchTraining], batches: Sequence[Any], expected: Arrays
) -> bool:
    """True if another training of the torch side has the same results.

    Functions that may draw random numbers, such as an attention with dropout, need not draw any.
    """
    training = make_torch_training("float64", InFloat64())
    for batch in batches:
        training.train_on(batch)
    found = training.compared()
    return all(np.array_equal(found[name], a, equal_nan=True) for name, a in expected.items())


def describe_departure(
    dtype: str, oracle: TorchTraining, own: TorchTraining, side: JaxTraining
) -> str:
    """A sentence that tells which of the loss, the gradient and the moments differ at a step."""
    rows = {
        "the loss": ({"": oracle.loss}, {"": own.loss}, {"": side.loss}),
        "the gradient": (oracle.gradients(), own.gradients(), side.gradients()),
    }
    torch_moments, jax_moments = own.moments(), side.moments()
    rows |= {
        name: (expected, torch_moments[name], jax_moments[MOMENTS[name]])
        for name, expected in oracle.moments().items()
        if MOMENTS[name] in jax_moments
    }
    clauses = []
    for what, (expected, *runs) in rows.items():
        if expected:
            torch_errors, jax_errors = (
                relative_errors(select(run, expected), expected, negligible=True) for run in runs
            )
            worst = max(jax_errors, key=lambda name: jax_errors[name])
            error, where = jax_errors[worst], f", most in {worst}" if worst else ""
            is_equal = error <= max(floor(jnp.dtype(dtype)), K * torch_errors[worst])
            clauses.append(
                f"{what} agrees" if is_equal else f"{what} departs by {error:.1e}{where}"
            )
    return "; ".join(clauses)


def norm(arrays: Arrays) -> float:
    """The Euclidean norm of all arrays together."""
    return float(np.sqrt(sum(rms(a) ** 2 * a.size for a in arrays.values())))
