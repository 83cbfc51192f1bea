"""Where a JAX port first departs from its torch module: submodule by submodule, as they run."""

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from jax.core import Tracer

from jax_models.weights import Table
from parity_tests.engine.problem import Problem, arrays, tensors
from parity_tests.engine.rounding import InFloat64
from parity_tests.engine.tolerance import K, floor, rms

METHODS = ("__call__", "sequence")
"""How modules of JAX call each other; `sequence` is that of this package's layers."""


@dataclasses.dataclass(frozen=True)
class Visit:
    """A torch submodule, its JAX counterpart, and how far JAX's input and output are off.

    The input is the first array that JAX's takes, the output all that it returns. Errors are
    relative to the closest array of the float64 torch submodule, whose axes may come in another
    order; None where there is none.
    """

    torch_name: str
    jax_name: str | None
    input_error: float | None
    output_error: float | None
    bound: float

    @property
    def input_departs(self) -> bool:
        """Did it get another input?"""
        return self.input_error is not None and not self.input_error <= self.bound

    @property
    def output_departs(self) -> bool:
        """Did it return another output?"""
        return self.output_error is not None and not self.output_error <= self.bound


@dataclasses.dataclass(frozen=True)
class Location:
    """The submodules in the order in which torch finished them, and the first that departs."""

    dtype: str
    visits: tuple[Visit, ...]

    @property
    def culprit(self) -> str | None:
        """The torch name of the submodule whose own code departs; "" is the whole module."""
        for visit in self.visits:
            if visit.input_departs:
                return visit.torch_name.rpartition(".")[0]
            if visit.output_departs:
                return visit.torch_name
        return None

    def __str__(self) -> str:
        """The submodules up to the culprit."""
        width = max(len(v.torch_name) for v in self.visits) + 8
        lines = [f"{self.dtype:{width}}{'input':>9}{'output':>9}  in JAX"]
        compared = [v for v in self.visits if (v.input_error, v.output_error) != (None, None)]
        for visit in compared:
            of_input, of_output = (
                "–" if e is None else f"{e:.1e}" for e in (visit.input_error, visit.output_error)
            )
            name, jax_name = (each or "(itself)" for each in (visit.torch_name, visit.jax_name))
            lines.append(f"{name:{width}}{of_input:>9}{of_output:>9}  {jax_name}")
            if visit.input_departs or visit.output_departs:
                break
        if rest := len(self.visits) - len(compared):
            lines.append(f"({rest} more have no counterpart in JAX that is called by itself)")
        culprit = self.culprit
        if culprit is None:
            culprit = "none, the forward pass agrees"
        return "\n".join([*lines, f"first to depart: {culprit or 'the module itself'}"])


Calls = dict[str, list[list[np.ndarray]]]
"""By submodule: the arrays of each of its calls."""


@dataclasses.dataclass
class Trace:
    """What went into the submodules and came out of them, in the order in which they finished."""

    inputs: Calls = dataclasses.field(default_factory=dict)
    outputs: Calls = dataclasses.field(default_factory=dict)


def floating(values: Any) -> list[np.ndarray]:
    """The floating arrays among some values, in float64; not those that are being traced."""
    leaves = jax.tree.leaves(values)
    return [
        np.asarray(leaf.detach().double().cpu() if isinstance(leaf, torch.Tensor) else leaf, float)
        for leaf in leaves
        if (isinstance(leaf, torch.Tensor) and leaf.is_floating_point())
        or (
            isinstance(leaf, jax.Array | np.ndarray)
            and not isinstance(leaf, Tracer)
            and jnp.issubdtype(leaf.dtype, jnp.floating)
        )
    ]


def checked_names(
    names: Mapping[str, str] | None, twin: torch.nn.Module, model: Any
) -> Mapping[str, str]:
    """The JAX paths of torch submodules, all of which exist.

    Raises:
        TypeError: it is no mapping.
        ValueError: there is no such submodule.

    """
    if names is None:
        return {}
    if not isinstance(names, Mapping):
        raise TypeError(f"names: expected a dict of torch names to JAX paths, got {names!r:.100}")
    if not isinstance(model, nnx.Module):
        return names  # the report says that submodules are not compared
    for side, given, known in (
        ("torch", names.keys(), dict(twin.named_modules())),
        ("JAX", names.values(), _paths(model).values()),
    ):
        for name in given:
            if name not in known:
                raise ValueError(
                    f"names: expected {side} submodules of {', '.join(filter(None, known))}, "
                    f"got {name!r}"
                )
    return names


def _paths(model: nnx.Module) -> dict[int, str]:
    """The path of each submodule, by its id."""
    return {id(module): ".".join(map(str, path)) for path, module in nnx.iter_modules(model)}


def find_departure(problem: Problem, dtype: str, names: Mapping[str, str]) -> Location | None:
    """Run both sides submodule by submodule in a dtype, the torch module in float64 beside them.

    None where the JAX side is no `nnx.Module`. `names` has the JAX paths of torch submodules that
    the weight table does not tell.
    """
    with InFloat64():
        oracle = trace_torch(problem, "float64")
    theirs = trace_torch(problem, dtype)
    model = problem.build(problem.twin, dtype)
    if not isinstance(model, nnx.Module):
        return None
    ours = trace_jax(problem, model, dtype)
    counterparts = {**matched([*oracle.outputs], [*ours.outputs], problem.table or []), **names}
    visits = []
    for name in oracle.outputs:
        path = counterparts.get(name)
        inputs, outputs = (
            [] if path is None else _stacked(calls.get(path, []))
            for calls in (ours.inputs, ours.outputs)
        )
        expected_inputs, expected = (
            _stacked(each[name]) for each in (oracle.inputs, oracle.outputs)
        )
        of_torch = _error(_stacked(theirs.outputs[name]), expected) or 0.0
        bound = max(floor(jnp.dtype(dtype)), K * of_torch)
        visits.append(
            Visit(name, path, _error(inputs[:1], expected_inputs), _error(outputs, expected), bound)
        )
    return Location(dtype, tuple(visits))


def trace_torch(problem: Problem, dtype: str) -> Trace:
    """What the torch module's submodules take and return."""
    twin, trace = copy.deepcopy(problem.twin).to(getattr(torch, dtype)), Trace()
    for name, module in twin.named_modules():

        def before(module, args, kwargs, name=name):
            trace.inputs.setdefault(name, []).append(floating((args, kwargs)))

        def after(module, args, result, name=name):
            trace.outputs.setdefault(name, []).append(floating(result))

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)
    with torch.no_grad():
        problem.call_twin(twin, *tensors(problem.inputs, dtype))
    return trace


def trace_jax(problem: Problem, model: nnx.Module, dtype: str) -> Trace:
    """What the JAX module's submodules take and return."""
    trace = Trace()
    with intercepted(model, trace), jax.default_matmul_precision("highest"):
        problem.call(model, *arrays(problem.inputs, dtype))
    return trace


@contextlib.contextmanager
def intercepted(model: nnx.Module, trace: Trace) -> Iterator[None]:
    """The calls of the model's submodules go through the trace."""
    paths = _paths(model)
    classes = {type(module) for _, module in nnx.iter_modules(model)}
    active: set[str] = set()

    def recording(method):
        def wrapper(self, *args, **kwargs):
            path = paths.get(id(self))
            if path is None or path in active:
                return method(self, *args, **kwargs)
            trace.inputs.setdefault(path, []).append(floating((args, kwargs)))
            active.add(path)
            try:
                result = method(self, *args, **kwargs)
            finally:
                active.discard(path)
            trace.outputs.setdefault(path, []).append(floating(result))
            return result

        return wrapper

    with contextlib.ExitStack() as stack:
        for cls, name in itertools.product(classes, METHODS):
            if any(name in vars(base) for base in cls.__mro__):
                stack.enter_context(_replaced(cls, name, recording(getattr(cls, name))))
        yield


@contextlib.contextmanager
def _replaced(cls: type, name: str, value: Any) -> Iterator[None]:
    own = vars(cls).get(name)
    setattr(cls, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(cls, name)
        else:
            setattr(cls, name, own)


def matched(torch_names: list[str], paths: list[str], table: Table) -> dict[str, str]:
    """The JAX path of each torch submodule that has the same weights, or else the same name.

    Where several inside each other have the same weights, the innermost go together.
    """

    def by_rows(names: list[str], side: str) -> dict[frozenset[int], list[str]]:
        groups: dict[frozenset[int], list[str]] = {}
        for name in sorted(names, key=len, reverse=True):
            rows = frozenset(
                i
                for i, row in enumerate(table)
                for weight in getattr(row, side)
                if weight.startswith(f"{name}.")
            )
            if rows:
                groups.setdefault(rows, []).append(name)
        return groups

    pairs = {name: name for name in torch_names if name in paths}
    ours = by_rows(paths, "params")
    for rows, names in by_rows(torch_names, "keys").items():
        pairs |= zip(names, ours.get(rows, []), strict=False)
    return pairs


def _error(actual: list[np.ndarray], expected: list[np.ndarray]) -> float | None:
    """The largest relative error of the arrays, each against the closest of those expected."""
    errors = [min(d) for array in actual if (d := [*_distances(array, expected)])]
    return max(errors, default=None)


def _stacked(calls: list[list[np.ndarray]]) -> list[np.ndarray]:
    """The arrays of several calls, the calls as an axis if they are more than one.

    Not those whose shape changes from call to call: a module that is used in several places.
    """
    return [
        np.squeeze(np.stack(each))
        for each in zip(*calls, strict=False)
        if len({array.shape for array in each}) == 1
    ]


def _distances(array: np.ndarray, candidates: list[np.ndarray]) -> Iterator[float]:
    """The array's relative errors as each candidate that has its axes, in whatever order."""
    for wanted in candidates:
        for order in itertools.permutations(range(array.ndim)):
            if array.transpose(order).shape == wanted.shape:
                yield rms(array.transpose(order) - wanted) / (rms(wanted) or 1.0)
