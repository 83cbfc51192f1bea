"""Finds out, by their numbers, which of the reference's weights each JAX module holds."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.candidates.model_weights import WeightsOnly
from parity_tests.engine.problem import Arrays, Problem, is_inexact
from parity_tests.engine.traces.frameworks import recording
from parity_tests.engine.traces.tap import observed
from parity_tests.engine.traces.trace import Call, Trace

Keys = frozenset[str]


def find_held_weights(problem: Problem, trace: Trace, owners: Mapping[str, str]) -> None:
    """Sets the `weights` of each call in JAX's trace to those that its module holds.

    For this purpose, JAX runs again with each weight filled with a different number, which
    identifies it. The weights of a model that keeps its own are identified by their own numbers.
    """
    # Fill each weight with a different number, which float32 represents exactly.
    weights, keys = problem.state_dict, [*dict.fromkeys(owners.values())]
    steps = np.random.default_rng(0).choice(2**22, len(keys), replace=False)
    fills = dict(zip(keys, (0.5 + steps / 2**23).tolist(), strict=True))
    by_fill = {fill: key for key, fill in fills.items()}
    filled = {
        key: np.broadcast_to(kind(fills[owner]), weights[key].shape)
        for key, owner in owners.items()
        for kind in (np.complex128 if np.iscomplexobj(weights[key]) else np.float64,)
    }

    def keys_of_fills(value: np.ndarray) -> set[str]:
        is_one = value.size and (value == value.flat[0]).all()  # sorting would take far longer
        found: set[str] = set()
        for number in np.unique(np.real(value.flat[:1] if is_one else value)).tolist():
            # A module may hold the sum of two biases, and zeros in places without a weight.
            sums = ((fill, number - fill) for fill in by_fill if number - fill in by_fill)
            parts = (number,) if number in by_fill else next(sums, ())
            if number and not parts:
                return set()
            found |= {by_fill[part] for part in parts}
        return found

    # Record which of these numbers the module of each call holds. If no module holds any, the model
    # keeps its own weights.
    held = _held_weights(problem, weights | filled, keys_of_fills)
    if not any(keys for _, keys in held):
        by_numbers = {_sorted_bytes(weights[key]): {key} for key in owners.values()}
        by_numbers[b""] = set()
        held = _held_weights(
            problem, weights, lambda value: by_numbers.get(_sorted_bytes(value), set())
        )

    # Both runs make the same calls, unless the model branches on its weights.
    modules = [call for call in trace.calls if call.kind not in ("tap", "run")]
    if [call.name for call in modules] == [name for name, _ in held]:
        for call, (_, keys) in zip(modules, held, strict=True):
            call.weights = frozenset(keys)


def _held_weights(
    problem: Problem, weights: Arrays, keys_of: Callable[[np.ndarray], set[str]]
) -> list[tuple[str, set[str]]]:
    """The name of each call in a run with these weights, and the keys of its module's weights.

    Only the part of the run that depends on no input is computed.
    """
    found: dict[Call, set[str]] = {}

    def on_weights(call: Call, leaves: list[Any]) -> None:
        keys = found.setdefault(call, set())
        for leaf in filter(is_inexact, leaves):
            observed(lambda value: keys.update(keys_of(value)), None, None, jnp.asarray(leaf))

    trace = Trace()
    filled = dataclasses.replace(problem, twin=WeightsOnly(weights))
    try:
        with recording(trace, filled, on_weights) as side, trace.running(trace.begin("", "run")):
            JaxSide(side).compute_weights(side)
    except Exception:  # a model may raise anything for such weights
        return []
    return [(call.name, found[call]) for call in trace.calls if call in found]


def _sorted_bytes(values: np.ndarray) -> bytes:
    """Identifies an array by its sorted numbers; empty if the array repeats one number."""
    if values.size < 2 or (values == values.flat[0]).all():
        return b""
    kind = np.complex64 if np.iscomplexobj(values) else np.float32
    return np.sort(values.astype(kind), axis=None).tobytes()
