"""The training of the torch side, in a dtype or under an arithmetic mode."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from jax_models.ops.checks import described
from jax_models.weights.stored import as_numpy
from parity_tests.engine.bounds.tolerance import ulp
from parity_tests.engine.bounds.torch_rounding import InFloat64, RandomRounding
from parity_tests.engine.candidates.torch_run import in_float64, tensors, twin_in_dtype
from parity_tests.engine.problem import Arrays, all_in_dtype, in_dtype, state_dict_arrays
from parity_tests.engine.training.dropout import TorchMasks

MOMENTS = {
    "exp_avg": "mu",
    "exp_avg_sq": "nu",
    "square_avg": "nu",
    "momentum_buffer": "trace",
    "sum": "sum_of_squares",
}
"""Optax's name for each moment of an optimizer in `torch.optim`."""


class TorchTraining:
    """Trains the twin batch by batch.

    With an arithmetic mode, the twin is cast to the dtype and then trained in float64 under that
    mode.
    """

    def __init__(
        self,
        twin: torch.nn.Module,
        dtype: str,
        arithmetic: InFloat64 | RandomRounding | None = None,
        *,
        loss: Callable[..., Any],
        optimizer: Callable[..., Any],
        scheduler: Callable[..., Any] | None,
        clip: Callable[..., Any] | None,
        average: Callable[..., Any] | None,
        accumulate: int,
        training: bool,
    ):
        # Under an arithmetic mode, the weights are rounded to the dtype but stored in float64.
        self._twin = twin_in_dtype(twin, dtype).train(training)
        if arithmetic is not None:
            self._twin = twin_in_dtype(self._twin, "float64")
        self._dtype, self._arithmetic = dtype, arithmetic
        self._loss, self._clip, self._accumulate = loss, clip, accumulate

        # The user's functions make the optimizer and the rest for this copy of the twin.
        self._optimizer = checked_result(
            "optimizer_twin", optimizer(self._twin), torch.optim.Optimizer
        )
        self._scheduler = self._average = None
        if scheduler is not None:
            kind = torch.optim.lr_scheduler.LRScheduler
            self._scheduler = checked_result("scheduler_twin", scheduler(self._optimizer), kind)
        if average is not None:
            self._average = average(self._twin)
            if not hasattr(self._average, "update_parameters"):
                raise TypeError(
                    "average_twin: expected it to return an AveragedModel, got "
                    f"{described(self._average)}"
                )
        self.count = 0
        """The number of batches so far."""
        self.masks: list[np.ndarray] = []
        """The dropout masks of the last batch."""
        self.loss = np.zeros(())
        self.gradients: Arrays = {}
        """The gradients of the current step, accumulated so far and not clipped."""

    def train_on(self, batch: Any) -> None:
        """Add the gradient of a batch, and take a step after every `accumulate` batches."""
        self.count += 1
        inputs = tensors(batch, self._dtype)
        with self._arithmetic or contextlib.nullcontext(), TorchMasks(self.count) as drawn:
            value = self._loss(self._twin, in_float64(inputs) if self._arithmetic else inputs)
            checked_loss("loss_twin", value, torch.Tensor)
            if not value.requires_grad:
                raise ValueError("loss_twin: expected a loss with a gradient, got one without")
            (value / self._accumulate).backward()
            self.gradients = {
                name: in_float64_array(weight.grad)
                for name, weight in self._parameters()
                if weight.grad is not None
            }
            if self.count % self._accumulate == 0:
                self._step()
        self.loss, self.masks = in_float64_array(value), drawn.masks

    def _step(self) -> None:
        if self._clip is not None:
            self._clip(self._twin.parameters())
        with self._rounded_rates():
            self._optimizer.step()
        self._optimizer.zero_grad()
        if self._scheduler is not None:
            self._scheduler.step()
        if self._average is not None:
            self._average.update_parameters(self._twin)

    @contextlib.contextmanager
    def _rounded_rates(self) -> Iterator[None]:
        """A context that perturbs the learning rates as rounding perturbs Adam's bias corrections.

        torch computes the corrections in float64, as Python numbers that random rounding does not
        reach. If β = 0.999 is off by half an ulp, the relative error of 1 - β is a thousand times
        as large. Without random rounding, the learning rates are unchanged.
        """
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        if isinstance(self._arithmetic, RandomRounding):
            step = self.count // self._accumulate
            half_ulp = min(ulp(self._dtype), ulp("float32")) / 2
            for group in groups:
                powers = [beta**step for beta in group.get("betas", ())]
                error = sum((step + 1) * half_ulp * power / (1 - power) for power in powers)
                group["lr"] = group["lr"] * (1 + error * self._arithmetic.noise())
        yield
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self._twin.named_parameters(remove_duplicate=False)

    def weights(self) -> Arrays:
        """The weights and buffers by key, the floating ones in float64."""
        return all_in_dtype(state_dict_arrays(self._twin.state_dict()), "float64")

    def average(self) -> Arrays:
        """The weights and buffers of the averaged module; empty if there is none."""
        averaged = getattr(self._average, "module", self._average)
        return (
            {}
            if averaged is None
            else all_in_dtype(state_dict_arrays(averaged.state_dict()), "float64")
        )

    def moments(self) -> dict[str, Arrays]:
        """The optimizer's moments, by torch's name of the moment and by the weight's key."""
        found: dict[str, Arrays] = {}
        for key, weight in self._parameters():
            for name, value in self._optimizer.state.get(weight, {}).items():
                if name in MOMENTS and isinstance(value, torch.Tensor):
                    found.setdefault(name, {})[key] = in_float64_array(value)
        return found


def in_float64_array(tensor: torch.Tensor) -> np.ndarray:
    """A copy of a floating tensor as a float64 array."""
    return in_dtype(as_numpy(tensor), "float64")


def checked_result(name: str, value: Any, kind: type) -> Any:
    """The object that a user's function has made, which must be of the right class."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected it to return a {kind.__name__}, got {described(value)}")
    return value


def checked_loss(name: str, value: Any, kind: type) -> None:
    """Check that a loss is a real scalar of its framework."""
    if not isinstance(value, kind) or value.shape != () or "float" not in str(value.dtype):
        raise TypeError(
            f"{name}: expected it to return a floating scalar of {kind.__module__.split('.')[0]}, "
            f"got {described(value)}"
        )
