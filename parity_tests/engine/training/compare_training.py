"""Trains a torch module and its JAX port side by side, and finds the step at which they differ."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import optax
import torch
from flax import nnx

from jax_models.checks.values import checked_bool, checked_size, described
from parity_tests.engine.candidates.model_weights import (
    ReferenceWeights,
    checked_weights,
    model_in_dtype,
)
from parity_tests.engine.candidates.port import port
from parity_tests.engine.candidates.torch_run import checked_twin
from parity_tests.engine.problem import (
    Problem,
    all_in_dtype,
    check_functions,
    checked_arrays,
    checked_dtypes,
)
from parity_tests.engine.references.torch_reference import TorchReference
from parity_tests.engine.training.jax_training import JaxTraining
from parity_tests.engine.training.side_by_side import train_side_by_side, x64
from parity_tests.engine.training.torch_training import TorchTraining
from parity_tests.engine.training.training_report import TrainingReport
from parity_tests.engine.training.weight_names import LoaderNames, Names, TableNames


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
    accumulate: int = 1,
    training: bool = False,
    weights: Any = None,
    dtypes: Iterable[str] = ("float64", "float32"),
) -> TrainingReport:
    """Trains both sides from the same weights on the same batches, and compares them at each step.

    The oracle is torch's training in float64. In float64, JAX may err by at most 1e-12. In other
    dtypes it may err by 4 times as much as torch at that step, or by as much as the conditioning of
    the training explains (`docs/design/bounds.md`): Adam, for example, enlarges gradients that
    consist of rounding errors alone. The verdict depends on the loss, the weights and the running
    statistics. Gradients and the optimizer's moments are shown for the first step that differs. JAX
    runs float32 and bfloat16 with x64 off.

    Args:
        twin: the torch module, with its weights.
        model: as in `compare`.
        batches: arrays, or trees of arrays; the floating ones are cast to each dtype.
        loss: `loss(model, batch)`, or `loss(weights, batch)` if the model is a function of weights;
            the loader makes these weights. If statistics change, such a loss returns
            `(loss, weights)` with the new weights. If the weights are a dict, the changed entries
            suffice, such as those that Linen's `apply(…, mutable=["batch_stats"])` returns. Arrays
            that the loader makes from torch's buffers alone are not trained.
        loss_twin: `loss_twin(twin, batch)`.
        optimizer: an optax optimizer, which includes the steps that torch takes outside of its
            optimizer (clipping, and `optax.MultiSteps` for `accumulate`). Or a function that makes
            one, such as `lambda: optax.adam(1e-3)`; it is called with x64 on for float64 and off
            for other dtypes.
        optimizer_twin: makes torch's optimizer for a copy of the twin.
        scheduler_twin: makes the scheduler of torch's optimizer, which steps after the optimizer.
        clip_twin: clips torch's gradients before each step.
        accumulate: the number of batches over which torch averages the gradient before each step.
        training: whether to run both sides in training mode, in which norms use the statistics of
            the batch. Set the rates of dropout to zero, because the two sides would draw different
            masks. By default both sides run in evaluation mode.
        weights: as in `compare`.
        dtypes: the dtypes to train in.

    Raises:
        ValueError: the weights do not fit the model, it is unknown which weights correspond, there
            is no batch or no dtype, or no step is taken.

    """
    # Refuse wrong arguments before anything runs.
    dtypes, training = checked_dtypes(dtypes), checked_bool("training", training)
    if not isinstance(batches, Iterable) or getattr(batches, "ndim", 1) == 0:
        raise TypeError(f"batches: expected a list of arrays, got {described(batches)}")
    batches = checked_arrays("batches", list(batches))
    if not len(batches):
        raise ValueError("batches: expected at least one")
    if checked_size("accumulate", accumulate) > len(batches):
        raise ValueError(
            f"accumulate: expected at most {len(batches)}, the number of batches, got "
            f"{accumulate}, with which no optimizer would take a step"
        )
    check_functions(
        {"loss": loss, "loss_twin": loss_twin, "optimizer_twin": optimizer_twin},
        {"scheduler_twin": scheduler_twin, "clip_twin": clip_twin},
    )

    checked_module = checked_twin(twin)
    with x64(True), jax.default_matmul_precision("highest"):
        # In training mode, a norm uses the statistics of the batch, so a port need not read the
        # running statistics. If it does not read them, they are not compared, which is no fault.
        reference, unread_statistics = TorchReference(checked_module).weights, []

        def affects_result(problem: Problem, key: str) -> bool:
            if not reference.affects_result(problem, key):
                return False
            if not training or key in reference.parameters:
                return True
            unread_statistics.append(key)
            return False

        # Find which weights correspond, and build JAX's training in each dtype. The loss of the
        # first batch shows whether the result depends on a weight that the loader does not read.
        problem = Problem(checked_module, call_twin=loss_twin, inputs=tuple(batches[:1]))
        problem, faults, _ = port(
            problem, replace(reference, affects_result=affects_result), model, weights
        )
        names, build = correspondence(problem, reference, weights, training)
        sides = {}
        for dtype in dtypes:
            with x64(dtype == "float64"):
                sides[dtype] = JaxTraining(
                    build(dtype),
                    dtype,
                    names,
                    loss=loss,
                    optimizer=optimizer,
                    accumulate=accumulate,
                )

        make_torch_training = partial(
            TorchTraining,
            checked_module,
            names=names,
            loss_twin=loss_twin,
            optimizer_twin=optimizer_twin,
            scheduler_twin=scheduler_twin,
            clip_twin=clip_twin,
            accumulate=accumulate,
            training=training,
        )
        report = train_side_by_side(names, sides, make_torch_training, batches)
    notes = [f"not compared: {key}" for key in unread_statistics]
    return replace(report, faults=(*faults, *report.faults), notes=(*notes, *report.notes))


def correspondence(
    problem: Problem, reference: ReferenceWeights, weights: Any, training: bool
) -> tuple[Names, Callable[[str], Any]]:
    """Names under which the two sides' weights correspond, and a function that builds JAX's side.

    The function takes a dtype.
    """
    table = problem.table
    if table is None and not callable(weights):
        raise ValueError(
            "weights: expected a weight table or a loader, because training compares "
            f"the weights of both sides by name; got {described(weights)}"
        )

    def load(state_dict: Any) -> Any:
        return checked_weights(weights(state_dict))

    def build(dtype: str) -> Any:
        arrays = all_in_dtype(reference.arrays, dtype)
        built = load(arrays) if table is None else problem.load(*problem.build(arrays, dtype))
        if not isinstance(built, nnx.Module):
            return built
        built, modes = model_in_dtype(built, dtype), ("deterministic", "use_running_average")
        return nnx.view(built, **dict.fromkeys(modes, not training), raise_if_not_found=False)

    if table is not None:
        return TableNames(table, reference.parameters), build
    in_float64 = all_in_dtype(reference.arrays, "float64")
    return LoaderNames(load, in_float64, reference.parameters), build
