"""The training of the JAX side in a dtype."""

import contextlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_models.checks.values import described
from jax_models.weights.trees import path_of
from parity_tests.engine.candidates.adapters import is_inexact
from parity_tests.engine.candidates.evaluator import with_dtypes
from parity_tests.engine.candidates.jax_program import ProgramFacts, wider_dtypes
from parity_tests.engine.problem import Arrays, arrays, in_dtype
from parity_tests.engine.training.torch_training import MOMENTS, checked_loss
from parity_tests.engine.training.weight_names import Names


class JaxTraining:
    """Trains the port batch by batch. x64 must be on for float64 and off for other dtypes."""

    def __init__(
        self,
        built: Any,
        dtype: str,
        names: Names,
        *,
        loss: Callable[..., Any],
        optimizer: Any,
        accumulate: int,
    ):
        # Split the weights, and initialize the optimizer.
        self._dtype, self._names, self._accumulate = dtype, names, accumulate
        self._parts = parts = SplitWeights(built, dtype, names.trained)
        self._params, self._statistics = parts.params, parts.statistics
        optimizer = make_optimizer(optimizer)
        self._state = optimizer.init(self._params)
        self._gradient = jax.tree.map(jnp.zeros_like, self._params)
        self._count = 0
        self.loss = np.zeros(())
        self.returns_statistics = isinstance(built, nnx.Module)
        """Whether the loss updates or returns statistics; for a function, known after a batch."""

        # A user's loss takes the whole model, but only its parameters are differentiated.
        def loss_of(params, statistics, batch):
            weights = parts.merge(params, statistics)
            value, new = loss(weights, batch), None
            if not isinstance(weights, nnx.Module) and type(value) is tuple and len(value) == 2:
                value, new = value
                self.returns_statistics = True
            checked_loss("loss", value, jax.Array)
            return value, parts.statistics_after(weights, new, statistics)

        # In float64, the loss ignores casts to float32, as it does on the torch side.
        dtypes = wider_dtypes(set()) if dtype == "float64" else {}
        loss_and_gradient = with_dtypes(
            jax.value_and_grad(loss_of, has_aux=True), dtypes, ProgramFacts()
        )

        # The optimizer sees each batch, because `optax.MultiSteps` accumulates; the mean gradient
        # is kept only to compare it.
        @jax.jit
        def train_step(params, statistics, state, gradient, batch):
            (value, statistics), new = loss_and_gradient(params, statistics, batch)
            updates, state = optimizer.update(new, state, params)
            gradient = jax.tree.map(lambda total, g: total + g / accumulate, gradient, new)
            return optax.apply_updates(params, updates), statistics, state, gradient, value

        self._train_step = train_step

    def train_on(self, batch: Any) -> None:
        """Adds the gradient of a batch, and takes a step after every `accumulate` batches."""
        if self._count % self._accumulate == 0:
            self._gradient = jax.tree.map(jnp.zeros_like, self._gradient)
        trained = self._params, self._statistics, self._state, self._gradient
        *trained, value = self._train_step(*trained, arrays(batch, self._dtype))
        self._params, self._statistics, self._state, self._gradient = trained
        self._count, self.loss = self._count + 1, np.asarray(value)

    def compared(self) -> Arrays:
        """The loss, the weights and the statistics, by name."""
        return {"the loss": self.loss, **self._named(self._params)}

    def gradients(self) -> Arrays:
        """The mean gradient of the last step, by name.

        A complex gradient is conjugated, because torch's is the complex conjugate of JAX's.
        """
        return self._named(jax.tree.map(jnp.conj, self._gradient))

    def moments(self) -> dict[str, Arrays]:
        """The optimizer's moments, by optax's name of the moment and by the weight's name."""

        def with_zeros(param: Any, moment: Any) -> Any:
            """Zeros for a weight that the mask of a part of the optimizer leaves out."""
            return jnp.zeros_like(param) if isinstance(moment, optax.MaskedNode) else moment

        found = {}
        for name in dict.fromkeys(MOMENTS.values()):
            trees = []
            for _, tree in optax.tree_utils.tree_get_all_with_path(self._state, name):
                with contextlib.suppress(ValueError):  # the tree is not like that of the weights
                    trees.append(jax.tree.map(with_zeros, self._params, tree))
            if trees:
                found[name] = self._named(jax.tree.map(lambda *each: sum(each), *trees))
        return found

    def _named(self, params: Any) -> Arrays:
        return self._names.jax_arrays(self._parts.merge(params, self._statistics))


class SplitWeights:
    """Splits the JAX side's weights into parameters, statistics and constants.

    The parameters are the `nnx.Param`s of an NNX module. In a tree, they are the real and complex
    arrays, except those that are made from torch's buffers alone, which are statistics. All other
    leaves of a tree are constants.
    """

    def __init__(self, built: Any, dtype: str, trained: set[str]):
        self._graphdef = None
        if isinstance(built, nnx.Module):
            self._graphdef, self.params, self.statistics = nnx.split(built, nnx.Param, ...)
            return

        def only(is_chosen: Callable[[str], bool]) -> Any:
            return jax.tree_util.tree_map_with_path(
                lambda path, a: (
                    jnp.asarray(in_dtype(a, dtype))
                    if is_inexact(a) and is_chosen(path_of(path))
                    else None
                ),
                built,
            )

        self.params = only(trained.__contains__)
        self.statistics = only(lambda path: path not in trained)
        self._constants = jax.tree.map(lambda a: None if is_inexact(a) else a, built)

    def merge(self, params: Any, statistics: Any) -> Any:
        """The module or tree that consists of these parts."""
        if self._graphdef is not None:
            return nnx.merge(self._graphdef, params, statistics, copy=True)
        return jax.tree.map(
            lambda *leaves: next((leaf for leaf in leaves if leaf is not None), None),
            params,
            statistics,
            self._constants,
            is_leaf=is_none,
        )

    def statistics_after(self, weights: Any, new: Any, statistics: Any) -> Any:
        """The statistics after a step: those of the NNX module, or those that the loss returns."""
        if self._graphdef is None:
            return jax.tree.map(
                lambda old, value: None if old is None else value,
                statistics,
                with_new_entries(weights, new),
                is_leaf=is_none,
            )
        changed = dict(nnx.to_flat_state(nnx.state(weights, nnx.Not(nnx.Param))))
        kept = [(path, changed.get(path, old)) for path, old in nnx.to_flat_state(statistics)]
        return nnx.from_flat_state(kept)


def is_none(leaf: Any) -> bool:
    """True if the leaf is None, which JAX would otherwise treat as an empty tree."""
    return leaf is None


def with_new_entries(weights: Any, new: Any) -> Any:
    """The weights with the new entries of a dict, or the new weights themselves."""
    if new is None:
        return weights
    if isinstance(weights, Mapping) and isinstance(new, Mapping):
        return {k: with_new_entries(v, new[k]) if k in new else v for k, v in weights.items()}
    return new


def make_optimizer(optimizer: Any) -> Any:
    """The optax optimizer; if a function that makes one is given, the optimizer that it makes."""
    if inspect.isfunction(optimizer) or isinstance(optimizer, partial):
        given = inspect.signature(optimizer).parameters.values()
        if all(parameter.default is not parameter.empty for parameter in given):
            optimizer = optimizer()
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(
            "optimizer: expected one of optax, or a function without arguments that makes one, "
            f"got {described(optimizer)}"
        )
    return optimizer
