"""The results of one side: arrays by group ("outputs", …) and name."""

import copy
import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from parity_tests.engine.bounds.tolerance import relative_errors
from parity_tests.engine.problem import Arrays, in_every_dtype

T = TypeVar("T")
GROUPS = ("outputs", "final state", "input gradient", "weight gradients")
ErrorsByGroup = dict[str, dict[str, float]]
"""Relative errors by group and name."""


class Results(dict[str, Arrays]):
    """Arrays by group and name."""

    without_gradient: frozenset[tuple[str, str]] = frozenset()
    """Group and name of each result that torch does not differentiate."""
    padding: Mapping[str, Collection[int]] = MappingProxyType({})
    """The rows of each embedding weight whose gradients torch drops, by the weight's name."""

    @property
    def forward(self) -> "Results":
        """The results of the forward pass."""
        results = Results({group: self[group] for group in GROUPS[:2] if group in self})
        results.without_gradient = self.without_gradient
        return results


def with_names_of(
    groups: dict[str, dict[str, Any]], names: Sequence[tuple[str, str]]
) -> dict[str, dict[str, Any]]:
    """The leaves under the other side's names, if both sides have equally many leaves.

    Leaves correspond by name if both sides have the same names, otherwise by order.
    """
    ours = {words_of_path(name): leaf for named in groups.values() for name, leaf in named.items()}
    leaves = [leaf for named in groups.values() for leaf in named.values()]
    if len(leaves) != len(names):
        return groups
    routes = [words_of_path(name) for _, name in names]
    are_named = any(not word.isdigit() for path in routes for word in path)
    if are_named and len(ours) == len(names) and {*routes} == {*ours}:
        leaves = [ours[path] for path in routes]
    result: dict[str, dict[str, Any]] = {}
    for (group, name), leaf in zip(names, leaves, strict=True):
        result.setdefault(group, {})[name] = leaf
    return result


def words_of_path(name: str) -> tuple[str, ...]:
    """The keys, fields and indices that lead to a leaf, without brackets and dots."""
    return tuple("".join(word) for word in re.findall(r"\.(\w+)|\['([^']*)'\]|\[(\d+)\]", name))


def leaves_by_group(
    result: Any, side: str, as_array: Callable[[Any], Any]
) -> dict[str, dict[str, Any]]:
    """A result's arrays by group and name; `as_array` returns None for a leaf that is not one."""
    first, *rest = result if type(result) is tuple else (result,)
    groups = {
        "outputs": leaves_of(first, "y"),
        "final state": leaves_of(rest[0] if len(rest) == 1 else tuple(rest), "state"),
    }
    arrays_by_group: dict[str, dict[str, Any]] = {}
    others = []
    for group, named in groups.items():
        for name, leaf in named.items():
            array = as_array(leaf)
            if array is None:
                others.append(f"{type(leaf).__name__} as {name}")
            else:
                arrays_by_group.setdefault(group, {})[name] = array
    if others and not arrays_by_group:
        raise TypeError(
            f"{side}: expected a tree of arrays, got {others[0]}: say what to compare by `call` "
            "and `call_twin`"
        )
    return arrays_by_group


def leaves_of(tree: Any, name: str) -> dict[str, Any]:
    """The leaves by name, in the order of their dicts and classes (JAX would sort the keys)."""
    if tree is None:
        return {}
    if isinstance(tree, Mapping):
        children = {f"['{key}']": value for key, value in tree.items()}
    elif isinstance(tree, tuple) and (fields := getattr(tree, "_fields", None)) is not None:
        children = {f".{key}": value for key, value in zip(fields, tree, strict=True)}
    elif isinstance(tree, list | tuple):
        children = {f"[{i}]": value for i, value in enumerate(tree)}
    elif dataclasses.is_dataclass(tree) and not hasattr(tree, "dtype"):
        children = {f".{f.name}": getattr(tree, f.name) for f in dataclasses.fields(tree)}
    else:
        return named_leaves(tree, name)
    return {
        key: leaf
        for child, value in children.items()
        for key, leaf in leaves_of(value, name + child).items()
    }


def named_leaves(tree: Any, name: str) -> dict[str, Any]:
    """The leaves by name and path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {name + jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def only_floating(named: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of real or complex numbers."""
    return {name: a for name, a in named.items() if jnp.issubdtype(a.dtype, jnp.inexact)}


def errors_of(results: Results, oracle: Results) -> ErrorsByGroup:
    """The relative error of each floating array in the groups that both sides have."""
    return {
        group: relative_errors(
            only_floating(results[group]),
            only_floating(oracle[group]),
            negligible="gradient" in group,
        )
        for group in filter(oracle.__contains__, results)
    }


def are_same(results: Results, others: Results) -> bool:
    """True if the outputs and final states of two runs are equal."""
    return all(
        np.array_equal(array, others[group][name], equal_nan=True)
        for group in GROUPS[:2]
        for name, array in results.get(group, {}).items()
    )


def replayable(runs: Iterable[T]) -> Callable[[], Iterator[T]]:
    """A function that iterates over the runs from the start, and makes each run only once."""
    (first,) = itertools.tee(runs, 1)
    return lambda: copy.copy(first)


def largest_by_group(runs: Iterable[ErrorsByGroup]) -> ErrorsByGroup:
    """The largest error of each tensor in any of the runs."""
    largest: ErrorsByGroup = {}
    for run in runs:
        for group, errors in run.items():
            known = largest.setdefault(group, errors)
            largest[group] = {name: max(error, known[name]) for name, error in errors.items()}
    return largest


def cotangents(seed: int, results: Results) -> list[np.ndarray]:
    """Random cotangents for the floating arrays of a result; zeros for one without a gradient."""
    rng = np.random.default_rng(seed)

    def draw(array: np.ndarray) -> np.ndarray:
        return in_every_dtype(rng.standard_normal(array.shape))

    return [
        (draw(array) + (1j * draw(array) if np.iscomplexobj(array) else 0))
        * ((group, name) not in results.without_gradient)
        for group in GROUPS[:2]
        for name, array in only_floating(results.get(group, {})).items()
    ]


def clear_padding_gradients(results: Results, rows: Mapping[str, Collection[int]]) -> bool:
    """Sets the gradients of padding rows to zero; returns whether any of them was not zero."""
    found = False
    for name, padding in rows.items():
        gradient = results["weight gradients"].get(name)
        for row in padding if gradient is not None else ():
            gradient = np.array(gradient)
            found |= bool(np.any(gradient[row]))
            gradient[row] = 0
            results["weight gradients"][name] = gradient
    return found


def not_finite(results: Results, side: str, oracle: Results | None = None) -> list[str]:
    """Faults for results that contain NaN.

    With an oracle, faults for results that are not finite although the oracle's are.
    """
    faults = []
    for group, named in results.items():
        for name, array in named.items():
            is_fault = np.isnan(array)
            if oracle is not None:
                is_fault = ~np.isfinite(array) & np.isfinite(oracle[group][name])
            if count := np.count_nonzero(is_fault):
                faults.append(
                    f"{group}, {name}: {count} of {array.size} numbers of the {side} side are not "
                    "finite"
                )
    return faults
