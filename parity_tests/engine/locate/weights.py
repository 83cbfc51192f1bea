"""Which torch weights each JAX module holds, seen in their numbers."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from parity_tests.engine.locate.frameworks import recording
from parity_tests.engine.locate.record import Call, Trace
from parity_tests.engine.locate.torch_side import marked, weight_owners
from parity_tests.engine.problem import Problem, arrays, arrays_of

Keys = frozenset[str]
MOST = 64
"""The most weights that one array is taken to be made of."""


def weigh(problem: Problem, trace: Trace) -> None:
    """Tell of each call of JAX's trace what torch weights its module holds.

    That is seen in a run in which each weight is filled with a number of its own; or, of a module
    that keeps the weights that it has, from these.
    """
    twin, marks = marked(problem.twin)
    sums = {a + b: frozenset((x, y)) for a, x in marks.items() for b, y in marks.items() if x != y}
    known = {mark: frozenset((key,)) for mark, key in marks.items()} | sums

    def of_marks(value: np.ndarray) -> Keys:
        numbers = np.unique(value.astype(np.float64))
        if len(numbers) > MOST:
            return frozenset()
        return frozenset().union(*(known.get(number, frozenset()) for number in numbers.tolist()))

    seen = _seen(problem, twin, of_marks)
    if not any(keys for _, keys, _ in seen):
        weights = _by_numbers(problem.twin)
        seen = _seen(
            problem,
            problem.twin,
            lambda value: weights.get(_sorted(value.astype(np.float32)), frozenset()),
        )
    modules = [call for call in trace.calls if call.kind not in ("tap", "run")]
    if [call.name for call in modules] == [name for name, *_ in seen]:
        for call, (_, keys, shapes) in zip(modules, seen, strict=True):
            call.weights, call.shapes = keys, shapes


def _seen(
    problem: Problem, twin: torch.nn.Module, keys_of: Callable[[np.ndarray], Keys]
) -> list[tuple[str, Keys, tuple]]:
    """The name, the keys and the shapes of each call in a run with the weights of a twin."""
    found: list[tuple[str, Keys, tuple]] = []

    def on_weights(call: Call, leaves: list[Any]) -> None:
        values = [np.asarray(x) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
        keys = frozenset().union(*map(keys_of, values))
        found.append((call.name, keys, tuple(sorted(value.shape for value in values))))

    trace = Trace()
    try:
        with recording(trace, problem, on_weights) as side, trace.running(trace.begin("", "run")):
            side.call(
                side.build(arrays_of(twin.state_dict()), "float64"),
                *arrays(problem.inputs, "float64"),
            )
    except Exception:  # whatever a model says of weights that are none
        return []
    return found


def _by_numbers(twin: torch.nn.Module) -> dict[bytes, Keys]:
    """The key of each weight by its numbers, but for those that are one number everywhere."""
    state = twin.state_dict(keep_vars=True)
    keys = dict.fromkeys(weight_owners(twin).values())
    numbers = {_sorted(state[key].detach().float().numpy()): frozenset((key,)) for key in keys}
    return {each: key for each, key in numbers.items() if each}


def _sorted(values: np.ndarray) -> bytes:
    """What tells an array from others in whatever order its numbers are."""
    if values.size < 2 or (values == values.flat[0]).all():
        return b""
    return np.sort(values, axis=None).tobytes()
