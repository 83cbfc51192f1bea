"""Train a torch module and its JAX port side by side: at which step, and where, do they part?"""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx

from jax_models.ops.checks import checked_bool, described
from jax_models.weights.stored import as_numpy
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
from parity_tests.engine.candidates.loader_weights import weights_in
from parity_tests.engine.problem import (
    Arrays,
    Problem,
    all_in_dtype,
    arrays_of,
    check_functions,
    checked_arrays,
    checked_dtypes,
    checked_int,
)
from parity_tests.engine.references.torch_port import port_of
from parity_tests.engine.training.both_trainings import (
    MOMENTS,
    JaxTraining,
    TorchTraining,
    made_optimizer,
)
from parity_tests.engine.training.dropout import MasksDifferError
from parity_tests.engine.training.weight_names import ByLoader, ByTable


@dataclasses.dataclass(frozen=True)
class TrainingReport:
    """The errors of the loss, the weights and the statistics after each step, by dtype."""

    steps: dict[str, tuple[Error, ...]]
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What was not compared."""
    gradient_norms: dict[str, tuple[tuple[float, float], ...]] = dataclasses.field(
        default_factory=dict
    )
    """After each step: that of torch in float64, and JAX's."""
    departures: dict[str, str] = dataclasses.field(default_factory=dict)
    """By dtype: how the loss, gradients and the optimiser's moments compare where they part."""

    @property
    def parting(self) -> dict[str, tuple[int, Error]]:
        """By dtype: the first step, from 1 on, after which they differ by more than rounding."""
        return {
            dtype: next((i, e) for i, e in enumerate(errors, 1) if not e.passed)
            for dtype, errors in self.steps.items()
            if not all(e.passed for e in errors)
        }

    @property
    def passed(self) -> bool:
        """Did they stay together to the end?"""
        compared = bool(self.steps) and all(self.steps.values())
        return compared and not self.faults and not self.parting

    def __str__(self) -> str:
        """The errors after the steps 1, 2, 4, … and the last, and where the two part."""
        lines = [f"{'':9}{'step':>6}{'torch':>9}{'JAX':>9}{'bound':>9}{'gradient norms':>22}"]
        for dtype, errors in self.steps.items():
            shown = {2**i for i in range(len(errors).bit_length())} | {len(errors)}
            norms = self.gradient_norms.get(dtype, [(np.nan, np.nan)] * len(errors))
            lines += [
                f"{dtype:9}{step:6}{e.torch:9.1e}{e.jax:9.1e}{e.bound:9.1e}{ours:11.3g}{theirs:11.3g}"
                for step, (e, (ours, theirs)) in enumerate(zip(errors, norms, strict=True), 1)
                if step in shown
            ]
        for dtype, (step, e) in self.parting.items():
            lines.append(
                f"FAIL: {dtype}: they part at step {step} by {e.jax:.1e}, most in {e.tensor}; "
                f"rounding explains {e.bound:.1e}"
            )
            lines += [self.departures[dtype]] if dtype in self.departures else []
        lines += [f"FAIL: {fault}" for fault in self.faults]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def compare_training(
    twin: torch.nn.Module,
    model: nnx.Module | Callable[..., Any],
    batches: Sequence[Any],
    *,
    loss: Callable[[Any, Any], Any],
    loss_twin: Callable[[Any, Any], torch.Tensor],
    optimizer: optax.GradientTransformation | Callable[[], Any],
    optimizer_twin: Callable[[torch.nn.Module], torch.optim.Optimizer],
    scheduler_twin: Callable[[torch.optim.Optimizer], Any] | None = None,
    clip_twin: Callable[[Iterable[torch.nn.Parameter]], Any] | None = None,
    average: Callable[[Any, Any, Any], Any] | None = None,
    average_twin: Callable[[torch.nn.Module], Any] | None = None,
    accumulate: int = 1,
    training: bool = False,
    weights: Any = None,
    dtypes: Iterable[str] = ("float64", "float32"),
) -> TrainingReport:
    """Train both sides from the same weights on the same batches, and compare them at each step.

    The oracle is torch's training in float64. JAX may err by 1e-12 in float64 and elsewhere by 4
    times what torch errs at that step, or by as much as the training's conditioning explains
    (`docs/bound.md`): Adam, say, enlarges gradients that are nothing but rounding.
    The loss, the weights, the running statistics and averaged weights decide. Gradients and the
    optimiser's moments are shown where the two part. JAX runs float32 and bfloat16 with x64 off.

    Args:
        twin: the torch module, with its weights.
        model: as in `compare`.
        batches: one a step: arrays, or trees of arrays; floating ones are cast to each dtype.
        loss: `loss(model, batch)`, or `loss(weights, batch)` if the model is a function of weights;
            the weights are what the loader makes. With statistics that change, such a loss returns
            `(loss, weights)`, the new weights or, of a dict, the entries that are new, as Linen's
            `apply(…, mutable=["batch_stats"])` gives them. What the loader makes of buffers alone
            is not trained.
        loss_twin: `loss_twin(twin, batch)`.
        optimizer: of optax, with all that torch does beside it (clipping, `optax.MultiSteps`), or
            a function that makes it where x64 is as in the dtype: `lambda: optax.adam(1e-3)`.
        optimizer_twin: makes the optimiser of torch for a copy of the twin.
        scheduler_twin: makes its scheduler, which steps after it.
        clip_twin: clips the gradients before a step of torch's.
        average: `average(weights, mean, count)`: the mean of the weights after a step, `count`
            steps after the first; the mean before the first is the initial weights.
        average_twin: makes torch's of a copy of the twin: `torch.optim.swa_utils.AveragedModel`.
        accumulate: batches whose mean gradient torch takes a step by.
        training: run both sides as in training, norms on their batches, and dropout with the same
            masks: the n-th one that torch draws in a step is the n-th of JAX. By default both run
            as in evaluation, without dropout, norms on their statistics.
        weights: as in `compare`.
        dtypes: those to train in.

    Raises:
        ValueError: the weights do not fit the model, nobody says which are which, there is no
            batch or no dtype, or no step is taken.

    """
    dtypes, training = checked_dtypes(dtypes), checked_bool("training", training)
    if not isinstance(batches, Iterable) or getattr(batches, "ndim", 1) == 0:
        raise TypeError(f"batches: expected a list of arrays, got {described(batches)}")
    batches = checked_arrays("batches", list(batches))
    if not len(batches):
        raise ValueError("batches: expected at least one")
    if checked_int("accumulate", accumulate, 1) > len(batches):
        raise ValueError(
            f"accumulate: expected at most the {len(batches)} batches, got {accumulate}: "
            "no optimizer would take a step"
        )
    check_functions(
        {"loss": loss, "loss_twin": loss_twin, "optimizer_twin": optimizer_twin},
        {
            "scheduler_twin": scheduler_twin,
            "clip_twin": clip_twin,
            "average": average,
            "average_twin": average_twin,
        },
    )
    if (average is None) != (average_twin is None):
        raise ValueError("average: expected both `average` and `average_twin`, or neither")
    made_optimizer(optimizer)

    of_torch = partial(
        TorchTraining,
        twin,
        loss=loss_twin,
        optimizer=optimizer_twin,
        scheduler=scheduler_twin,
        clip=clip_twin,
        average=average_twin,
        accumulate=accumulate,
        training=training,
    )
    with x64(True), jax.default_matmul_precision("highest"):
        problem, faults, notes = port_of(twin, model, weights)
        if isinstance(model, nnx.Module) and problem.table is None:
            raise ValueError(notes[0])
        names, build = correspondence(problem, twin, weights, training)
        faults, notes = left_out(faults, twin) if training else (faults, [])
        sides = {}
        for dtype in dtypes:
            with x64(dtype == "float64"):
                sides[dtype] = JaxTraining(
                    build(dtype),
                    dtype,
                    names,
                    loss=loss,
                    optimizer=optimizer,
                    average=average,
                    accumulate=accumulate,
                )
        comparison = Comparison(names, sides, of_torch, batches)
        try:
            comparison.run()
        except MasksDifferError as error:
            return TrainingReport({}, (*faults, str(error)), tuple(notes))
    return comparison.report(faults, notes)


@contextlib.contextmanager
def x64(enabled: bool) -> Iterator[None]:
    """As in a user's program that computes in float64, or in less.

    An optimiser that was made where x64 is on may then ask for float64 in vain.
    """
    with jax.enable_x64(enabled), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Explicitly requested dtype float64", UserWarning)
        yield


def correspondence(
    problem: Problem, twin: torch.nn.Module, weights: Any, training: bool
) -> tuple[ByTable | ByLoader, Callable[[str], Any]]:
    """Which weights of the two sides are the same, and what builds JAX's in a dtype."""
    parameters = {name for name, _ in twin.named_parameters(remove_duplicate=False)}

    def in_mode(built: Any) -> Any:
        if not isinstance(built, nnx.Module) or not training:
            return built
        modes = {"deterministic": False, "use_running_average": False}
        return nnx.view(built, **modes, raise_if_not_found=False)

    if problem.table is not None:
        build = lambda dtype: in_mode(problem.build(problem.state_dict, dtype))  # noqa: E731
        return ByTable(problem.table, parameters), build

    state_dict = arrays_of(twin.state_dict())

    def load(state_dict: Any) -> Any:
        loaded = weights(state_dict)
        if isinstance(loaded, nnx.Module):
            return loaded
        return jax.tree.map(lambda a: as_numpy(a) if isinstance(a, torch.Tensor) else a, loaded)

    def build(dtype: str) -> Any:
        loaded = load(all_in_dtype(state_dict, dtype))
        return in_mode(weights_in(loaded, dtype)) if isinstance(loaded, nnx.Module) else loaded

    return ByLoader(load, all_in_dtype(state_dict, "float64"), parameters), build


def left_out(faults: Iterable[str], twin: torch.nn.Module) -> tuple[list[str], list[str]]:
    """The faults, but as notes those of statistics, which training does not need."""
    unread = {f"weights: the loader does not read {name}" for name, _ in twin.named_buffers()}
    notes = [f"not compared: {fault.rpartition(' ')[2]}" for fault in faults if fault in unread]
    return [fault for fault in faults if fault not in unread], notes


class Comparison:
    """All trainings, batch by batch beside each other."""

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
        """The errors, and what cannot be said by them."""
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
                "`loss`, with what they become"
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
        """Torch's gradients or moments, under the names that they have in JAX one by one."""
        weights = self._oracle.weights()
        zeros = weights | {k: np.zeros(a.shape) for k, a in weights.items() if is_floating(a)}
        chosen = self._names.of_torch(zeros | {k: np.ones(a.shape) for k, a in by_key.items()})
        given = {n for n, a in chosen.items() if a.all() and n in self._names.arranged}
        return only(self._names.of_torch(zeros | by_key), given)

    def _departure(self, dtype: str, side: JaxTraining, gradients: Arrays) -> str:
        """How the loss, the gradients and the optimiser's moments compare at a step."""
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
    """A training under an arithmetic, which runs as far as is asked for."""

    def __init__(self, of_torch: Callable[..., TorchTraining], dtype: str, arithmetic: Any):
        self._make, self._training = partial(of_torch, dtype, arithmetic), None
        self._done = 0

    def after(self, batches: Sequence[Any]) -> TorchTraining:
        """The training after these batches, those of the call before among them."""
        self._training = self._training or self._make()
        for batch in batches[self._done :]:
            self._training.train_on(batch)
        self._done = len(batches)
        return self._training


def averaged(arrays: Arrays) -> Arrays:
    """Under the names of averages."""
    return {f"average of {name}": array for name, array in arrays.items()}


def only(arrays: Arrays, names: Iterable[str]) -> Arrays:
    """Those of the names."""
    return {name: arrays[name] for name in arrays if name in names}


def norm(arrays: Iterable[np.ndarray]) -> float:
    """The norm of all of them together."""
    return float(np.sqrt(sum(rms(a) ** 2 * a.size for a in arrays)))
