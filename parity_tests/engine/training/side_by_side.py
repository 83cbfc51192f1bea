"""Run the trainings of both sides batch by batch, and compare them."""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_models.weights.trees import is_floating
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
from parity_tests.engine.training.weight_names import ByLoader, ByTable


@contextlib.contextmanager
def x64(enabled: bool) -> Iterator[None]:
    """A context with x64 on or off, as in a user's program in float64 or in another dtype.

    An optimizer that was made with x64 on may ask for float64 in vain; that warning is ignored.
    """
    with jax.enable_x64(enabled), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Explicitly requested dtype float64", UserWarning)
        yield


class SideBySide:
    """Runs all trainings batch by batch, and compares them after each batch."""

    def __init__(
        self,
        names: ByTable | ByLoader,
        sides: dict[str, JaxTraining],
        of_torch: Callable[..., TorchTraining],
        batches: Sequence[Any],
    ):
        self._names, self._sides, self._batches = names, sides, batches
        in_float64 = InFloat64()
        self._oracle = of_torch("float64", in_float64)
        self._twins = {dtype: of_torch(dtype) for dtype in {*sides, "float32"}}
        self._rounded = {
            dtype: [
                LateTraining(of_torch, dtype, RandomRounding(dtype, seed, in_float64.decisions))
                for seed in range(ROUNDED_RUNS)
            ]
            for dtype in sides
        }
        self._before = self._compared(self._oracle)
        self._errors: dict[str, list[Error]] = {dtype: [] for dtype in sides}
        self._norms: dict[str, list[tuple[float, float]]] = {dtype: [] for dtype in sides}
        self._departures: dict[str, str] = {}
        self._random: dict[str, None] = {}
        self._changed: set[str] = set()

    def run(self) -> None:
        """Train, and keep the errors of each step."""
        for step, batch in enumerate(self._batches, 1):
            self._oracle.train_on(batch)
            self._random |= self._oracle.random
            for training in self._twins.values():
                training.train_on(batch)
            oracle = self._compared(self._oracle)
            for dtype, side in self._sides.items():
                with x64(dtype == "float64"):
                    side.train_on(batch, self._oracle.masks)
                    ours = {"the loss": side.loss, **side.weights(), **averaged(side.average())}
                    gradients = side.gradients()
                self._norms[dtype].append(self._norms_of(gradients))
                shown = {
                    name
                    for name in oracle
                    if name in ours and (side.returns_statistics or name not in self._statistics())
                }
                error = group_error(
                    jnp.dtype(dtype),
                    oracle=only(oracle, shown),
                    torch=only(self._compared(self._twins[dtype]), shown),
                    jax=only(ours, shown),
                    torch32=only(self._compared(self._twins["float32"]), shown),
                    rounded=self._scatter(dtype, step, only(oracle, shown)),
                )
                self._errors[dtype].append(error)
                if not error.passed and dtype not in self._departures:
                    with x64(dtype == "float64"):
                        self._departures[dtype] = self._departure(dtype, side, gradients)

    def report(self, faults: Iterable[str], notes: Iterable[str]) -> TrainingReport:
        """The report of the errors, with faults and notes."""
        faults, notes = [*faults], [*notes]
        after = self._compared(self._oracle)
        same = {n for n, a in after.items() if np.array_equal(a, self._before.get(n, np.nan))}
        if self._names.trained <= same:
            faults.append(
                "training: no weight of the torch side changed, there is nothing to compare"
            )
        if not all(side.returns_statistics for side in self._sides.values()) and (
            changed := sorted(self._statistics() - same)
        ):
            notes.append(
                f"not compared: {', '.join(changed)}, which change: return `(loss, weights)` from "
                "`loss`, with their new values"
            )
        if self._random:
            notes.append(
                f"torch draws random numbers ({', '.join(self._random)}), which JAX does not get: "
                "give both sides the same in the batch"
            )
        return TrainingReport(
            {dtype: tuple(errors) for dtype, errors in self._errors.items()},
            tuple(faults),
            tuple(notes),
            {dtype: tuple(norms) for dtype, norms in self._norms.items()},
            self._departures,
        )

    def _statistics(self) -> set[str]:
        return {name for name in self._before if name not in self._names.trained} - {"the loss"}

    def _compared(self, training: TorchTraining) -> Arrays:
        """The loss, the weights, the statistics and the averaged weights of torch's side."""
        of_torch, trained = self._names.of_torch, self._names.trained
        mean = training.average()
        return {
            "the loss": training.loss,
            **of_torch(training.weights()),
            **(averaged(only(of_torch(mean), trained)) if mean else {}),
        }

    def _scatter(self, dtype: str, step: int, oracle: Arrays) -> Iterator[dict[str, float]]:
        """The errors of trainings with random rounding."""
        for run in self._rounded[dtype]:
            after = self._compared(run.after(self._batches[:step]))
            yield relative_errors(only(after, {*oracle}), oracle)

    def _norms_of(self, gradients: Arrays) -> tuple[float, float]:
        """The norms of torch's gradient and of JAX's, over the weights that torch trains."""
        theirs = self._in_names(self._oracle.gradients)
        return norm(theirs.values()), norm(gradients[name] for name in theirs)

    def _in_names(self, by_key: Arrays) -> Arrays:
        """Torch's gradients or moments under JAX's names, for weights that JAX holds one by one."""
        weights = self._oracle.weights()
        zeros = weights | {k: np.zeros(a.shape) for k, a in weights.items() if is_floating(a)}
        chosen = self._names.of_torch(zeros | {k: np.ones(a.shape) for k, a in by_key.items()})
        given = {n for n, a in chosen.items() if a.all() and n in self._names.arranged}
        return only(self._names.of_torch(zeros | by_key), given)

    def _departure(self, dtype: str, side: JaxTraining, gradients: Arrays) -> str:
        """How the loss, the gradients and the optimizer's moments compare at a step."""
        theirs = self._twins[dtype]
        compared = [("the loss", *({"": run.loss} for run in (self._oracle, theirs, side)))]
        compared.append(
            (
                "the gradient",
                *(self._in_names(run.gradients) for run in (self._oracle, theirs)),
                gradients,
            )
        )
        moments, of_torch = side.moments(), theirs.moments()
        compared += [
            (name, *(self._in_names(each) for each in (by_key, of_torch[name])), moments[ours])
            for name, by_key in self._oracle.moments().items()
            if (ours := MOMENTS[name]) in moments
        ]
        told = []
        for name, oracle, rounded, jax_side in compared:
            if oracle:
                errors, of_rounding = (
                    relative_errors(only(each, {*oracle}), oracle, negligible=True)
                    for each in (jax_side, rounded)
                )
                worst = max(errors, key=lambda key: errors[key])
                bound = max(floor(jnp.dtype(dtype)), K * of_rounding[worst])
                where = f", most in {worst}" if worst else ""
                told.append(
                    f"{name} agrees"
                    if errors[worst] <= bound
                    else f"{name} departs by {errors[worst]:.1e}{where}"
                )
        return f"      at that step {'; '.join(told)}"


class LateTraining:
    """A training under an arithmetic mode, which runs only as far as needed."""

    def __init__(self, of_torch: Callable[..., TorchTraining], dtype: str, arithmetic: Any):
        self._make, self._training = partial(of_torch, dtype, arithmetic), None
        self._done = 0

    def after(self, batches: Sequence[Any]) -> TorchTraining:
        """The training after these batches, which begin with those of the call before."""
        self._training = self._training or self._make()
        for batch in batches[self._done :]:
            self._training.train_on(batch)
        self._done = len(batches)
        return self._training


def averaged(arrays: Arrays) -> Arrays:
    """The arrays under the names of averages."""
    return {f"average of {name}": array for name, array in arrays.items()}


def only(arrays: Arrays, names: Iterable[str]) -> Arrays:
    """The arrays that have these names."""
    return {name: arrays[name] for name in arrays if name in names}


def norm(arrays: Iterable[np.ndarray]) -> float:
    """The norm of all arrays together."""
    return float(np.sqrt(sum(rms(a) ** 2 * a.size for a in arrays)))
