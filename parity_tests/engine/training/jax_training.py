"""JAX's training in a dtype."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_models.ops.checks import described
from jax_models.weights.trees import is_floating, path_of
from parity_tests.engine.candidates.jax_program import Found
from parity_tests.engine.candidates.lift import rewritten
from parity_tests.engine.problem import Arrays, arrays
from parity_tests.engine.training.dropout import jax_masks
from parity_tests.engine.training.torch_training import MOMENTS, checked_loss
from parity_tests.engine.training.weight_names import ByLoader, ByTable


class JaxTraining:
    """The port's training, batch by batch; x64 must be on for float64 and off otherwise."""

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
        """Add the gradient of a batch, and take a step after every `accumulate` batches."""
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
        """The optimizer's moments that have the weights' structure, by optax's name and by name."""
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
        """A tree of the optimizer's, with zeros for weights that its mask leaves out."""
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
    """Splits the JAX side's weights into those that are differentiated and the rest."""

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
        """The module or tree that these parts make up."""
        if self._graphdef is not None:
            return nnx.merge(self._graphdef, params, rest, copy=True)
        return jax.tree.map(
            lambda p, other: other if p is None else p,
            params,
            self._others,
            is_leaf=lambda leaf: leaf is None,
        )

    def after(self, weights: Any, new: Any, params: Any, rest: Any) -> tuple[Any, Any]:
        """The statistics after a step: those in the tree of weights, and those in the rest."""
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
        """The tree, with leaves of `others` in place of those that are not trained."""
        if self._graphdef is not None:
            return tree
        return jax.tree.map(
            lambda trained, value, other: value if trained else other,
            self._is_trained,
            tree,
            others,
        )


def updated(weights: Any, new: Any) -> Any:
    """The weights with the new entries of a dict, or the new weights themselves."""
    if new is None:
        return weights
    if isinstance(weights, Mapping) and isinstance(new, Mapping):
        return {k: updated(v, new[k]) if k in new else v for k, v in weights.items()}
    return new


def made_optimizer(optimizer: Any) -> Any:
    """The optax optimizer, or the one that a function makes."""
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
