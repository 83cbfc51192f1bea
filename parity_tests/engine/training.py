"""Train a torch module and its JAX port side by side: at which step, and where, do they part?"""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx

from jax_models.ops.checks import described
from parity_tests.engine.compare import port
from parity_tests.engine.problem import (
    Arrays,
    Problem,
    arrays,
    check_functions,
    checked_arrays,
    checked_dtypes,
    checked_int,
    in_double,
    tensors,
)
from parity_tests.engine.rounding import InFloat64, RandomRounding
from parity_tests.engine.tolerance import ROUNDED_RUNS, Error, group_error


@dataclasses.dataclass(frozen=True)
class TrainingReport:
    """The errors of the loss and of the weights after each step, by dtype."""

    steps: dict[str, tuple[Error, ...]]
    faults: tuple[str, ...] = ()

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
        lines = [f"{'':9}{'step':>6}{'torch':>9}{'JAX':>9}{'bound':>9}"]
        for dtype, errors in self.steps.items():
            shown = {2**i for i in range(len(errors).bit_length())} | {len(errors)}
            lines += [
                f"{dtype:9}{step:6}{e.torch:9.1e}{e.jax:9.1e}{e.bound:9.1e}"
                for step, e in enumerate(errors, 1)
                if step in shown
            ]
        lines += [
            f"FAIL: {dtype}: they part at step {step} by {e.jax:.1e}, most in {e.tensor}; rounding "
            f"explains {e.bound:.1e}"
            for dtype, (step, e) in self.parting.items()
        ]
        return "\n".join([*lines, *(f"FAIL: {fault}" for fault in self.faults)])


def compare_training(
    twin: torch.nn.Module,
    model: nnx.Module | Callable[..., Any],
    batches: Sequence[Any],
    *,
    loss: Callable[[Any, Any], Any],
    loss_twin: Callable[[Any, Any], torch.Tensor],
    optimizer: optax.GradientTransformation,
    optimizer_twin: Callable[[torch.nn.Module], torch.optim.Optimizer],
    scheduler_twin: Callable[[torch.optim.Optimizer], Any] | None = None,
    clip_twin: Callable[[Iterable[torch.nn.Parameter]], Any] | None = None,
    accumulate: int = 1,
    weights: Any = None,
    dtypes: Iterable[str] = ("float64", "float32"),
) -> TrainingReport:
    """Train both sides from the same weights on the same batches, and compare them at each step.

    The oracle is torch's training in float64. JAX may err by 1e-12 in float64 and elsewhere by 4
    times what torch errs at that step, or by as much as the training's conditioning explains
    (`docs/bound.md`): Adam, say, enlarges gradients that are nothing but rounding.
    Both sides run as in evaluation: without dropout, norms on their statistics.

    Args:
        twin: the torch module, with its weights.
        model: as in `compare`.
        batches: one a step: arrays, or trees of arrays; floating ones are cast to each dtype.
        loss: `loss(model, batch)`, or `loss(weights, batch)` if the model is a function of weights.
        loss_twin: `loss_twin(twin, batch)`.
        optimizer: of optax; with all that torch does beside it (clipping, `optax.MultiSteps`).
        optimizer_twin: makes the optimiser of torch for a copy of the twin.
        scheduler_twin: makes its scheduler, which steps after it.
        clip_twin: clips the gradients before a step of torch's.
        accumulate: batches whose mean gradient torch takes a step by.
        weights: as in `compare`.
        dtypes: those to train in.

    Raises:
        ValueError: the weights do not fit the model, nobody says which are which, there is no
            batch or no dtype, or no step is taken.

    """
    dtypes = checked_dtypes(dtypes)
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
        {"scheduler_twin": scheduler_twin, "clip_twin": clip_twin},
    )
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(f"optimizer: expected one of optax, got {described(optimizer)}")

    def of_torch(
        dtype: str, arithmetic: InFloat64 | RandomRounding | None = None
    ) -> Iterator[Arrays]:
        """The loss and the weights after each step, under an arithmetic in float64 if given."""
        copied = copy.deepcopy(twin).cpu().to(getattr(torch, dtype)).eval()
        if arithmetic is not None:
            copied = copied.double()
        torch_optimizer = optimizer_twin(copied)
        check_made("optimizer_twin", torch_optimizer, torch.optim.Optimizer)
        scheduler = None
        if scheduler_twin is not None:
            scheduler = scheduler_twin(torch_optimizer)
            check_made("scheduler_twin", scheduler, torch.optim.lr_scheduler.LRScheduler)
        for step, batch in enumerate(batches, 1):
            inputs = tensors(batch, dtype)
            with arithmetic or contextlib.nullcontext():
                value = loss_twin(copied, in_double(inputs) if arithmetic else inputs)
                checked_loss("loss_twin", value, torch.Tensor)
                if not value.requires_grad:
                    raise ValueError("loss_twin: expected a loss with a gradient, got one without")
                (value / accumulate).backward()
                if step % accumulate == 0:
                    if clip_twin is not None:
                        clip_twin(copied.parameters())
                    torch_optimizer.step()
                    torch_optimizer.zero_grad()
                    if scheduler is not None:
                        scheduler.step()
            yield {
                "the loss": value.detach().double().numpy(),
                **{
                    name: weight.detach().double().numpy().copy()
                    for name, weight in copied.named_parameters(remove_duplicate=False)
                },
            }

    def of_jax(problem: Problem, dtype: str) -> Iterator[Arrays]:
        built, graphdef, rest = problem.build(problem.twin, dtype), None, None
        if isinstance(built, nnx.Module):
            graphdef, built, rest = nnx.split(built, nnx.Param, ...)

        def merged(params):
            return params if graphdef is None else nnx.merge(graphdef, params, rest)

        @jax.jit
        def train_step(params, state, batch):
            value, gradient = jax.value_and_grad(
                lambda p: checked_loss("loss", loss(merged(p), batch), jax.Array)
            )(params)
            updates, state = optimizer.update(gradient, state, params)
            return optax.apply_updates(params, updates), state, value

        params, state = built, optimizer.init(built)
        for batch in batches:
            params, state, value = train_step(params, state, arrays(batch, dtype))
            assert problem.to_torch is not None
            yield {"the loss": np.asarray(value), **problem.to_torch(merged(params))}

    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        problem, faults, notes = port(twin, model, weights)
        if problem.to_torch is None:
            raise ValueError(notes[0])
        steps: dict[str, list[Error]] = {dtype: [] for dtype in dtypes}
        of_twins = {dtype: of_torch(dtype) for dtype in {*steps, "float32"}}
        of_ports = {dtype: of_jax(problem, dtype) for dtype in steps}
        in_float64 = InFloat64()
        rounded = {
            dtype: RoundedTrainings(
                of_torch(dtype, RandomRounding(dtype, seed, in_float64.decisions))
                for seed in range(ROUNDED_RUNS)
            )
            for dtype in steps
        }
        before = {
            name: weight.detach().double().numpy().copy()
            for name, weight in problem.twin.named_parameters()
        }
        oracle: Arrays = before
        for step, oracle in enumerate(of_torch("float64", in_float64), 1):
            theirs = {dtype: next(run) for dtype, run in of_twins.items()}
            for dtype, port_run in of_ports.items():
                ours = next(port_run)
                error = group_error(
                    jnp.dtype(dtype),
                    oracle=oracle,
                    torch=theirs[dtype],
                    jax={name: ours[name] for name in oracle},
                    torch32=theirs["float32"],
                    scatter=partial(rounded[dtype].after, step),
                )
                steps[dtype].append(error)
    if all(np.array_equal(oracle[name], weight) for name, weight in before.items()):
        faults.append("training: no weight of the torch side changed, there is nothing to compare")
    return TrainingReport({dtype: tuple(e) for dtype, e in steps.items()}, tuple(faults))


def check_made(name: str, value: Any, kind: type) -> None:
    """Refuse a function that makes something else."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected it to return a {kind.__name__}, got {described(value)}")


def checked_loss(name: str, value: Any, kind: type) -> Any:
    """A loss, which is one real number of its side."""
    if not isinstance(value, kind) or value.shape != () or "float" not in str(value.dtype):
        raise TypeError(
            f"{name}: expected it to return a floating scalar of {kind.__module__.split('.')[0]}, "
            f"got {described(value)}"
        )
    return value


class RoundedTrainings:
    """Trainings with random rounding, which run as far as is asked for."""

    def __init__(self, runs: Iterable[Iterator[Arrays]]):
        self._runs, self._step = list(runs), 0

    def after(self, step: int) -> list[Arrays]:
        """The loss and the weights of each after a step, later than that of the call before."""
        skipped, self._step = step - self._step - 1, step
        return [next(islice(run, skipped, None)) for run in self._runs]
