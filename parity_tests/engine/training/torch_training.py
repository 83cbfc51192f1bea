"""The training of the torch side, in a dtype or under an arithmetic mode."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from jax_models.checks.values import described
from jax_models.weights.stored import as_numpy
from parity_tests.engine.bounds.tolerance import ulp
from parity_tests.engine.bounds.torch_rounding import InFloat64, RandomRounding
from parity_tests.engine.candidates.torch_run import in_float64, tensors, twin_in_dtype
from parity_tests.engine.problem import (
    Arrays,
    all_in_dtype,
    in_dtype,
    is_inexact,
    state_dict_arrays,
)
from parity_tests.engine.training.weight_names import Names, select

MOMENTS = {
    "exp_avg": "mu",
    "exp_avg_sq": "nu",
    "square_avg": "nu",
    "momentum_buffer": "trace",
    "sum": "sum_of_squares",
}
"""Optax's name for each moment of an optimizer in `torch.optim`."""


@dataclasses.dataclass
class TorchTraining:
    """Trains the twin batch by batch.

    With an arithmetic mode, the twin is cast to the dtype and then trained in float64 under that
    mode.
    """

    twin: torch.nn.Module
    dtype: str
    arithmetic: InFloat64 | RandomRounding | None = None
    _: dataclasses.KW_ONLY
    names: Names
    loss_twin: Callable[..., Any]
    optimizer_twin: Callable[..., Any]
    scheduler_twin: Callable[..., Any] | None
    clip_twin: Callable[..., Any] | None
    accumulate: int
    training: bool

    def __post_init__(self) -> None:
        # Under an arithmetic mode, the weights are rounded to the dtype but stored in float64.
        self.twin = twin_in_dtype(self.twin, self.dtype).train(self.training)
        if self.arithmetic is not None:
            self.twin = twin_in_dtype(self.twin, "float64")

        # The user's functions make the optimizer and the rest for this copy of the twin.
        optim = torch.optim
        optimizer = self.optimizer_twin(self.twin)
        self._optimizer = checked_result("optimizer_twin", optimizer, optim.Optimizer)
        self._scheduler = None
        if self.scheduler_twin is not None:
            scheduler, kind = self.scheduler_twin(optimizer), optim.lr_scheduler.LRScheduler
            self._scheduler = checked_result("scheduler_twin", scheduler, kind)
        self.count = 0
        """The number of batches so far."""
        self.loss = np.zeros(())
        self._gradients: Arrays = {}

    def train_on(self, batch: Any) -> None:
        """Adds the gradient of a batch, and takes a step after every `accumulate` batches."""
        self.count += 1
        inputs = tensors(batch, self.dtype)
        with self.arithmetic or contextlib.nullcontext():
            value = self.loss_twin(self.twin, in_float64(inputs) if self.arithmetic else inputs)
            checked_loss("loss_twin", value, torch.Tensor)
            if not value.requires_grad:
                raise ValueError("loss_twin: expected a loss with a gradient, got one without")
            (value / self.accumulate).backward()
            self._gradients = {
                name: in_float64_array(weight.grad)
                for name, weight in self._parameters()
                if weight.grad is not None
            }
            if self.count % self.accumulate == 0:
                self._step()
        self.loss = in_float64_array(value)

    def _step(self) -> None:
        if self.clip_twin is not None:
            self.clip_twin(self.twin.parameters())
        with self._rounded_rates():
            self._optimizer.step()
        self._optimizer.zero_grad()
        if self._scheduler is not None:
            self._scheduler.step()

    @contextlib.contextmanager
    def _rounded_rates(self) -> Iterator[None]:
        """A context that perturbs the learning rates as rounding perturbs Adam's bias corrections.

        torch computes the corrections in float64, as Python numbers that random rounding does not
        reach. If β = 0.999 is off by half an ulp, the relative error of 1 - β is a thousand times
        as large. Without random rounding, the learning rates are unchanged.
        """
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        if isinstance(self.arithmetic, RandomRounding):
            step = self.count // self.accumulate
            half_ulp = min(ulp(self.dtype), ulp("float32")) / 2
            for group in groups:
                powers = [beta**step for beta in group.get("betas", ())]
                error = sum((step + 1) * half_ulp * power / (1 - power) for power in powers)
                group["lr"] = group["lr"] * (1 + error * self.arithmetic.noise())
        yield
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self.twin.named_parameters(remove_duplicate=False)

    def weights(self) -> Arrays:
        """The weights and the statistics, by name."""
        return self.names.torch_arrays(state_in_float64(self.twin))

    def compared(self) -> Arrays:
        """The loss, the weights and the statistics, by name."""
        return {"the loss": self.loss, **self.weights()}

    def gradients(self) -> Arrays:
        """The gradients of the current step, accumulated so far and not clipped, by name."""
        return self._named(self._gradients)

    def moments(self) -> dict[str, Arrays]:
        """The optimizer's moments, by torch's name of the moment and by the weight's name."""
        found: dict[str, Arrays] = {}
        for key, weight in self._parameters():
            for name, value in self._optimizer.state.get(weight, {}).items():
                if name in MOMENTS and isinstance(value, torch.Tensor):
                    found.setdefault(name, {})[key] = in_float64_array(value)
        return {name: self._named(by_key) for name, by_key in found.items()}

    def _named(self, by_key: Arrays) -> Arrays:
        """Gradients or moments under the common names.

        Weights that JAX holds only in sums, and weights without a gradient in torch, are left out.
        """
        weights = state_in_float64(self.twin)
        zeros = weights | {k: np.zeros(a.shape) for k, a in weights.items() if is_inexact(a)}
        ones = {key: np.ones(array.shape) for key, array in by_key.items()}
        covered = self.names.torch_arrays(zeros | ones)
        whole = {name for name, array in covered.items() if array.all()}
        return select(self.names.torch_arrays(zeros | by_key), whole & self.names.unsummed)


def state_in_float64(module: torch.nn.Module) -> Arrays:
    """The weights and buffers by key, the floating ones in float64."""
    return all_in_dtype(state_dict_arrays(module.state_dict()), "float64")


def in_float64_array(tensor: torch.Tensor) -> np.ndarray:
    """A copy of a floating tensor as a float64 array."""
    return in_dtype(as_numpy(tensor), "float64")


def checked_result(name: str, value: Any, kind: type) -> Any:
    """The object that a user's function has made, which must be of the right class."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected it to return a {kind.__name__}, got {described(value)}")
    return value


def checked_loss(name: str, value: Any, kind: type) -> None:
    """Checks that a loss is a real scalar of its framework."""
    if not isinstance(value, kind) or value.shape != () or "float" not in str(value.dtype):
        raise TypeError(
            f"{name}: expected it to return a floating scalar of {kind.__module__.split('.')[0]}, "
            f"got {described(value)}"
        )
