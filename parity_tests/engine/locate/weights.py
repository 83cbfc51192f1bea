"""Find which of the reference's weights each JAX module holds, by their numbers."""

import dataclasses
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from parity_tests.engine.candidates.adapters import is_floating
from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.locate.frameworks import recording
from parity_tests.engine.locate.record import Call, Trace, observed
from parity_tests.engine.problem import Arrays, Problem

Keys = frozenset[str]
MOST = 64
"""An array with more distinct numbers is not made of filled weights."""


def weigh(problem: Problem, trace: Trace, owners: Mapping[str, str]) -> None:
    """Note for each call of JAX's trace which weights of the reference its module holds.

    In a run for this purpose, each weight is filled with a number of its own, which identifies it.
    A model that keeps its own weights is recognized by their numbers instead.
    """
    marks, marked = _marked(problem.state_dict, owners)
    sums = {a + b: frozenset((x, y)) for a, x in marks.items() for b, y in marks.items() if x != y}
    known = {mark: frozenset((key,)) for mark, key in marks.items()} | sums

    def of_marks(value: np.ndarray) -> Keys:
        is_one = value.size and (value == value.flat[0]).all()
        numbers = np.unique(np.real(value.flat[:1] if is_one else value).astype(np.float64))
        if len(numbers) > MOST:
            return frozenset()
        return frozenset().union(*(known.get(number, frozenset()) for number in numbers.tolist()))

    seen = _seen(problem, marked, of_marks)
    if not any(keys for _, keys, _ in seen):
        weights = _by_numbers(problem.state_dict, owners)
        seen = _seen(
            problem, problem.state_dict, lambda value: weights.get(_sorted(value), frozenset())
        )
    modules = [call for call in trace.calls if call.kind not in ("tap", "run")]
    if [call.name for call in modules] == [name for name, *_ in seen]:
        for call, (_, keys, shapes) in zip(modules, seen, strict=True):
            call.weights, call.shapes = keys, shapes


def _marked(weights: Arrays, owners: Mapping[str, str]) -> tuple[dict[float, str], Arrays]:
    """The key of each mark, and the weights, each filled with its mark."""
    keys = [*dict.fromkeys(owners.values())]
    steps = np.random.default_rng(0).choice(2**22, len(keys), replace=False)
    marks = {key: 0.5 + float(step) / 2**23 for key, step in zip(keys, steps, strict=True)}
    filled = {
        key: np.broadcast_to(kind(marks[owner]), weights[key].shape)
        for key, owner in owners.items()
        for kind in (np.complex128 if np.iscomplexobj(weights[key]) else np.float64,)
    }
    return {mark: key for key, mark in marks.items()}, {**weights, **filled}


def _seen(
    problem: Problem, weights: Arrays, keys_of: Callable[[np.ndarray], Keys]
) -> list[tuple[str, Keys, tuple]]:
    """The name, the keys and the shapes of each call in a run with these weights.

    Only the part of that run that depends on no input is computed.
    """
    found: list[tuple[str, set[str], tuple]] = []

    def on_weights(call: Call, leaves: list[Any]) -> None:
        keys: set[str] = set()
        floating = [leaf for leaf in leaves if is_floating(leaf)]
        found.append((call.name, keys, tuple(sorted(leaf.shape for leaf in floating))))
        for leaf in floating:
            observed(lambda value: keys.update(keys_of(value)), lambda _: None, jnp.asarray(leaf))

    trace = Trace()
    filled = dataclasses.replace(problem, twin=SimpleNamespace(state_dict=lambda: weights))
    try:
        with recording(trace, filled, on_weights) as side, trace.running(trace.begin("", "run")):
            JaxSide(side).compute_weights(side)
    except Exception:  # a model may raise anything for such weights
        return []
    return [(name, frozenset(keys), shapes) for name, keys, shapes in found]


def _by_numbers(weights: Arrays, owners: Mapping[str, str]) -> dict[bytes, Keys]:
    """The key of each weight by its numbers, except weights that repeat one number."""
    numbers = {_sorted(weights[key]): frozenset((key,)) for key in owners.values()}
    return {each: key for each, key in numbers.items() if each}


def _sorted(values: np.ndarray) -> bytes:
    """Identifies an array by its numbers in any order; empty if it repeats one number."""
    if values.size < 2 or (values == values.flat[0]).all():
        return b""
    kind = np.complex64 if np.iscomplexobj(values) else np.float32
    return np.sort(values.astype(kind), axis=None).tobytes()
