"""A planted fault, which a check must find, and functions that plant one."""

import contextlib
import dataclasses
import itertools
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp

Plant = Callable[[], contextlib.AbstractContextManager[Any]]
"""Makes a context in which the fault is planted."""

# The names of checks that must find faults.
STEPS = "steps equal sequence"
ROLLOUT = "steps with reset equal replay"
CUT = "cut equals uncut"
ROWS = "batch rows are independent"
PAST_AND_FUTURE = "future has no influence and far past has"
PADDING = "padding has no influence"
LEFT_PADDING = "left padding has no influence"
DOCUMENTS = "documents in a row stay apart"
TRAJECTORY = "optimizer follows the same trajectory"


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A fault in a case of the registry, and the check that must find it.

    A layer that is built under `plant()`, its problem and its results have the fault.
    """

    name: str
    case: str
    kind: Literal["weights", "forward", "states and masks", "training"]
    plant: Plant
    check: str | None = None
    """The check that must find the fault; None means the comparison with the twin."""
    dtypes: tuple[str, ...] = ("float64",)
    """The dtypes in which the comparison must fail."""
    culprit: str | None = None
    """The twin's submodule that `locate` must name; "" is the whole module."""

    def __str__(self) -> str:
        """The case, the fault, and the check that must find it."""
        return f"{self.case}: {self.name} ({self.check or 'agrees with twin'})"


def replaced(targets: str | Sequence[str], wrong: Callable[[Any], Any]) -> Plant:
    """Replaces the object at `module.attribute` or `module.Class.attribute` by `wrong(object)`.

    JAX's caches are cleared before and afterwards, so that everything is compiled again.
    """

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.callback(jax.clear_caches)
            for target in [targets] if isinstance(targets, str) else targets:
                stack.enter_context(_patched(target, wrong))
            jax.clear_caches()
            yield

    return plant


def _patched(target: str, wrong: Callable[[Any], Any]) -> contextlib.AbstractContextManager[Any]:
    path, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(path)
    return mock.patch.object(owner, name, wrong(getattr(owner, name)))


def edited(edit: Callable[[Any], None]) -> Plant:
    """Edits every layer of a case as soon as its weights are loaded.

    JAX's caches stay, because a program depends on the layer that it is compiled for.
    """

    def wrong(load):
        def load_edited(*args):
            layer = load(*args)
            edit(layer)
            return layer

        return load_edited

    return lambda: _patched("parity_tests.registry.case.Case.load", wrong)


def submodule_at(model: Any, path: str) -> Any:
    """The submodule or parameter of a model at a path."""
    for part in path.split("."):
        model = model[int(part)] if part.isdigit() else getattr(model, part)
    return model


def with_value(path: str, name: str, value: object) -> Plant:
    """Sets an attribute of the submodule at a path."""
    return edited(lambda layer: setattr(submodule_at(layer, path), name, value))


def zeroed(path: str) -> Plant:
    """Sets a weight to zeros."""

    def edit(layer):
        submodule_at(layer, path)[...] = jnp.zeros_like(submodule_at(layer, path)[...])

    return edited(edit)


def transposed(path: str) -> Plant:
    """Transposes a square matrix, or the first square of a wide one, as a wrong loader may."""

    def edit(layer):
        kernel = submodule_at(layer, path)
        side = kernel.shape[0]
        kernel[...] = kernel[...].at[:, :side].set(kernel[...][:, :side].T)

    return edited(edit)


def exchanged(path: str, first: str, second: str) -> Callable[[Any], None]:
    """Exchanges two parts of the submodule at a path."""

    def edit(layer):
        owner = submodule_at(layer, path)
        one, other = getattr(owner, first), getattr(owner, second)
        setattr(owner, first, other)
        setattr(owner, second, one)

    return edit


def without_1(_: Any) -> Callable[..., Any]:
    """Makes a norm compute `x / rms · scale` instead of `x / rms · (1 + scale)`."""
    return lambda norm, x, square, scale: x * jax.lax.rsqrt(square + norm.epsilon) * scale


def gates_swapped(path: str, count: int) -> Plant:
    """Swaps the first two of `count` gates in all weights of a cell."""

    def edit(layer):
        cell = submodule_at(layer, path)
        for name, array in cell.arrays().items():
            if not name.endswith("hr"):
                first, second, *rest = jnp.split(array, count, axis=-1)
                getattr(cell, name)[...] = jnp.concatenate([second, first, *rest], axis=-1)

    return edited(edit)


def two_swapped() -> Plant:
    """Swaps the first two different weights that have the same shape."""

    def wrong(from_torch):
        def from_swapped(layer, weights, layout):
            first, second = next(
                (a, b)
                for a, b in itertools.combinations(weights, 2)
                if weights[a].shape == weights[b].shape and (weights[a] != weights[b]).any()
            )
            swapped = {first: weights[second], second: weights[first]}
            return from_torch(layer, {**weights, **swapped}, layout)

        return from_swapped

    return lambda: _patched("parity_tests.registry.case.from_torch", wrong)


def epsilon_doubled(path: str) -> Plant:
    """Doubles the epsilon of a norm."""

    def edit(layer):
        submodule_at(layer, path).epsilon *= 2

    return edited(edit)


def gelu_by_tanh() -> Plant:
    """Replaces the exact GELU by the approximation with tanh, which is JAX's default."""
    return replaced("jax_models.ops.gelu", lambda _: jax.nn.gelu)


def ignoring(mask: str) -> Callable[[Any], Any]:
    """Makes a function ignore one of its masks."""
    removed: dict[str, None] = {mask: None} | ({"active": None} if mask == "lengths" else {})

    def without(rows: Any = None, **kwargs: Any) -> dict[str, Any]:
        if rows is None:
            return {**kwargs, mask: None}
        return {**kwargs, "rows": dataclasses.replace(rows, **removed)}

    return lambda function: lambda *args, **kwargs: function(*args, **without(**kwargs))


def mask_ignored(case: str, target: str) -> list[Mutation]:
    """Two faults of a case: an operator that ignores resets, and one that ignores lengths."""
    return [
        Mutation(name, case, "states and masks", replaced(target, ignoring(mask)), check)
        for name, mask, check in (
            ("resets forgotten", "reset", DOCUMENTS),
            ("lengths forgotten", "lengths", PADDING),
        )
    ]


def identity(_: Any) -> Callable[..., Any]:
    """Replaces a function by one that returns its first argument."""
    return lambda x, *args: x
