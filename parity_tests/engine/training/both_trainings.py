"""One training: of torch's side in a dtype or under an arithmetic, or of JAX's in a dtype."""

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx

from jax_models.ops.checks import described
from jax_models.weights.trees import is_floating, path_of
from parity_tests.engine.bounds.tolerance import ulp
from parity_tests.engine.bounds.torch_rounding import InFloat64, RandomRounding
from parity_tests.engine.candidates.lift import Found, rewritten
from parity_tests.engine.candidates.torch_module import in_double, tensors
from parity_tests.engine.problem import Arrays, arrays
from parity_tests.engine.training.dropout import TorchMasks, jax_masks
from parity_tests.engine.training.weight_names import ByLoader, ByTable

MOMENTS = {
    "exp_avg": "mu",
    "exp_avg_sq": "nu",
    "square_avg": "nu",
    "momentum_buffer": "trace",
    "sum": "sum_of_squares",
}
"""The names of torch.optim's moments, and those of optax's."""


class TorchTraining:
    """The twin's training, batch by batch."""

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
        self.twin = copy.deepcopy(twin).cpu().to(getattr(torch, dtype)).train(training)
        if arithmetic is not None:
            self.twin = self.twin.double()
        self._dtype, self._arithmetic = dtype, arithmetic
        self._double = arithmetic is not None or dtype == "float64"
        self._loss, self._clip, self._accumulate = loss, clip, accumulate
        self._optimizer = made("optimizer_twin", optimizer(self.twin), torch.optim.Optimizer)
        self._scheduler = self._average = None
        if scheduler is not None:
            kind = torch.optim.lr_scheduler.LRScheduler
            self._scheduler = made("scheduler_twin", scheduler(self._optimizer), kind)
        if average is not None:
            self._average = average(self.twin)
            if not hasattr(self._average, "update_parameters"):
                raise TypeError(
                    "average_twin: expected it to return an AveragedModel, got "
                    f"{described(self._average)}"
                )
        self._count = 0
        self.masks: list[np.ndarray] = []
        self.random: dict[str, None] = {}
        self.loss = np.zeros(())
        self.gradients: Arrays = {}
        """Those of the last step, before they were clipped."""

    def train_on(self, batch: Any) -> None:
        """Add a batch's gradient, and take a step by as many as make one."""
        self._count += 1
        inputs = tensors(batch, self._dtype)
        masks = TorchMasks(self._count)
        with self._arithmetic or contextlib.nullcontext(), masks:
            value = self._loss(self.twin, in_double(inputs) if self._arithmetic else inputs)
            checked_loss("loss_twin", value, torch.Tensor)
            if not value.requires_grad:
                raise ValueError("loss_twin: expected a loss with a gradient, got one without")
            (value / self._accumulate).backward()
            self.gradients = {
                name: copied(weight.grad)
                for name, weight in self._named()
                if weight.grad is not None
            }
            if self._count % self._accumulate == 0:
                self._step()
        self.loss, self.masks, self.random = copied(value), masks.masks, masks.random

    def _step(self) -> None:
        if self._clip is not None:
            self._clip(self.twin.parameters())
        with self._rounded_rates(), default_dtype(torch.float64 if self._double else torch.float32):
            self._optimizer.step()
        self._optimizer.zero_grad()
        if self._scheduler is not None:
            self._scheduler.step()
        if self._average is not None:
            self._average.update_parameters(self.twin)

    @contextlib.contextmanager
    def _rounded_rates(self) -> Iterator[None]:
        """The rates, as far off as rounding puts Adam's bias corrections in float32.

        torch has them in float64. A β of 0.999, off by half an ulp, is a thousand times as far
        off in 1 - β.
        """
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        if isinstance(self._arithmetic, RandomRounding):
            step = self._count // self._accumulate
            half_ulp = min(ulp(self._dtype), ulp("float32")) / 2
            for group in groups:
                powers = [beta**step for beta in group.get("betas", ())]
                error = sum((step + 1) * half_ulp * power / (1 - power) for power in powers)
                group["lr"] = group["lr"] * (1 + error * self._arithmetic.noise())
        yield
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def _named(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [*self.twin.named_parameters(remove_duplicate=False)]

    def weights(self) -> Arrays:
        """The weights and buffers, by key."""
        return numbers(self.twin)

    def average(self) -> Arrays:
        """Those of the averaged module, if there is one."""
        return (
            {}
            if self._average is None
            else numbers(getattr(self._average, "module", self._average))
        )

    def moments(self) -> dict[str, Arrays]:
        """The optimiser's moments, by torch's name and by key."""
        found: dict[str, Arrays] = {}
        for key, weight in self._named():
            for name, value in self._optimizer.state.get(weight, {}).items():
                if name in MOMENTS and isinstance(value, torch.Tensor):
                    found.setdefault(name, {})[key] = copied(value)
        return found


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within it, torch.optim keeps scalars, as NAdam's product of momenta, in the dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def numbers(module: torch.nn.Module) -> Arrays:
    """A copy of a module's weights and buffers, the floating ones in float64."""
    return {
        key: copied(value) if value.is_floating_point() else value.cpu().numpy().copy()
        for key, value in module.state_dict().items()
    }


def copied(tensor: torch.Tensor) -> np.ndarray:
    """A copy of it in float64."""
    return tensor.detach().cpu().double().numpy().copy()


class JaxTraining:
    """The port's training, batch by batch; to be used where x64 is on for float64 alone."""

    def __init__(
        self,
        built: Any,
        dtype: str,
        names: ByTable | ByLoader,
        *,
        loss: Callable[..., Any],
        optimizer: Any,
        average: Callable[..., Any] | None,
        accumulate: int,
    ):
        self._dtype, self._names, self._accumulate = dtype, names, accumulate
        self._count, self._steps = 0, 0
        self.returns_statistics = isinstance(built, nnx.Module)
        self._parts = Parts(built, dtype, names.trained)
        self._optimizer = optimizer = made_optimizer(optimizer)
        self._params, self._rest = self._parts.params, self._parts.rest
        self._state = optimizer.init(self._params)
        self._mean = self._params if average is not None else None
        self._gradient = jax.tree.map(jnp.zeros_like, self._params)
        self.loss = np.zeros(())

        def loss_of(params, rest, batch, masks):
            weights = self._parts.merged(params, rest)
            with jax_masks(masks):
                result = loss(weights, batch)
            value, new = result, None
            if not isinstance(weights, nnx.Module) and type(result) is tuple and len(result) == 2:
                value, new = result
                self.returns_statistics = True
            checked_loss("loss", value, jax.Array)
            return value, self._parts.after(weights, new, params, rest)

        loss_and_gradient = rewritten(jax.value_and_grad(loss_of, has_aux=True), {}, Found())

        @jax.jit
        def train_step(params, rest, state, gradient, batch, masks):
            (value, (statistics, rest)), new = loss_and_gradient(params, rest, batch, masks)
            new = self._parts.only_trained(new, jax.tree.map(jnp.zeros_like, new))
            updates, state = optimizer.update(new, state, params)
            params = self._parts.only_trained(optax.apply_updates(params, updates), statistics)
            gradient = jax.tree.map(lambda total, g: total + g / accumulate, gradient, new)
            return params, rest, state, gradient, value

        self._train_step = train_step
        self._average = None if average is None else jax.jit(average)

    def train_on(self, batch: Any, masks: list[np.ndarray]) -> None:
        """Add a batch's gradient, and take a step by as many as make one."""
        if self._count % self._accumulate == 0:
            self._gradient = jax.tree.map(jnp.zeros_like, self._gradient)
        self._params, self._rest, self._state, self._gradient, value = self._train_step(
            self._params, self._rest, self._state, self._gradient, arrays(batch, self._dtype), masks
        )
        self._count, self.loss = self._count + 1, np.asarray(value)
        if self._average is not None and self._count % self._accumulate == 0:
            self._mean = self._average(self._params, self._mean, jnp.asarray(self._steps))
            self._steps += 1

    def weights(self) -> Arrays:
        """The weights and statistics, by name."""
        return self._named(self._params)

    def average(self) -> Arrays:
        """The averaged weights, if there are any."""
        return {} if self._mean is None else self._named(self._mean)

    def gradients(self) -> Arrays:
        """The mean gradient of the last step."""
        return self._named(self._gradient)

    def moments(self) -> dict[str, Arrays]:
        """The optimiser's moments that are like the weights, by optax's name and by name."""
        found = {}
        for name in dict.fromkeys(MOMENTS.values()):
            trees = [
                tree
                for _, value in optax.tree_utils.tree_get_all_with_path(self._state, name)
                if (tree := self._like_params(value)) is not None
            ]
            if trees:
                found[name] = self._named(jax.tree.map(lambda *each: sum(each), *trees))
        return found

    def _like_params(self, value: Any) -> Any:
        """A tree of the optimiser's with zeros where its mask leaves a weight out."""
        leaves = jax.tree.leaves(value, is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode))
        params, structure = jax.tree.flatten(self._params)
        if len(leaves) != len(params):
            return None
        zeros = [
            jnp.zeros_like(p) if isinstance(leaf, optax.MaskedNode) else leaf
            for leaf, p in zip(leaves, params, strict=True)
        ]
        return jax.tree.unflatten(structure, zeros)

    def _named(self, params: Any) -> Arrays:
        return self._names.of_jax(self._parts.merged(params, self._rest))


class Parts:
    """The JAX side's weights as what is differentiated, and the rest."""

    def __init__(self, built: Any, dtype: str, trained: set[str]):
        self._graphdef = None
        if isinstance(built, nnx.Module):
            self._graphdef, self.params, self.rest = nnx.split(built, nnx.Param, ...)
            return
        cast = jax.tree.map(lambda a: jnp.asarray(a, dtype) if is_floating(a) else a, built)
        self.params = jax.tree.map(lambda a: a if is_floating(a) else None, cast)
        self.rest = None
        self._others = jax.tree.map(lambda a: None if is_floating(a) else a, cast)
        self._is_trained = jax.tree_util.tree_map_with_path(
            lambda path, _: path_of(path) in trained, self.params
        )

    def merged(self, params: Any, rest: Any) -> Any:
        """The module, or the tree."""
        if self._graphdef is not None:
            return nnx.merge(self._graphdef, params, rest, copy=True)
        return jax.tree.map(
            lambda p, other: other if p is None else p,
            params,
            self._others,
            is_leaf=lambda leaf: leaf is None,
        )

    def after(self, weights: Any, new: Any, params: Any, rest: Any) -> tuple[Any, Any]:
        """What a step leaves of the statistics: in the tree of the weights, and in the rest."""
        if self._graphdef is None:
            merged = updated(weights, new)
            return jax.tree.map(
                lambda old, value: None if old is None else value,
                params,
                merged,
                is_leaf=lambda leaf: leaf is None,
            ), None
        changed = dict(nnx.to_flat_state(nnx.state(weights, nnx.Not(nnx.Param))))
        kept = [(path, changed.get(path, value)) for path, value in nnx.to_flat_state(rest)]
        return params, nnx.from_flat_state(kept)

    def only_trained(self, tree: Any, others: Any) -> Any:
        """The tree, with others in the places of what is not trained."""
        if self._graphdef is not None:
            return tree
        return jax.tree.map(
            lambda trained, value, other: value if trained else other,
            self._is_trained,
            tree,
            others,
        )


def updated(weights: Any, new: Any) -> Any:
    """The weights with the entries of a dict that are new, or the new weights themselves."""
    if new is None:
        return weights
    if isinstance(weights, Mapping) and isinstance(new, Mapping):
        return {k: updated(v, new[k]) if k in new else v for k, v in weights.items()}
    return new


def made_optimizer(optimizer: Any) -> Any:
    """The optimiser of optax, or the one that a function makes."""
    if inspect.isfunction(optimizer) or isinstance(optimizer, partial):
        needed = [
            p for p in inspect.signature(optimizer).parameters.values() if p.default is p.empty
        ]
        optimizer = optimizer() if not needed else optimizer
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(
            "optimizer: expected one of optax, or a function without arguments that makes one, "
            f"got {described(optimizer)}"
        )
    return optimizer


def made(name: str, value: Any, kind: type) -> Any:
    """Refuse a function that makes something else."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected it to return a {kind.__name__}, got {described(value)}")
    return value


def checked_loss(name: str, value: Any, kind: type) -> Any:
    """A loss, which is one real number of its side."""
    if not isinstance(value, kind) or value.shape != () or "float" not in str(value.dtype):
        raise TypeError(
            f"{name}: expected it to return a floating scalar of {kind.__module__.split('.')[0]}, "
            f"got {described(value)}"
        )
    return value
