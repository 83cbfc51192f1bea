"""Runs a torch module and records each call of its submodules, or runs a single call again."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from parity_tests.engine.candidates.torch_run import Prepare, forward, weight_owners
from parity_tests.engine.problem import Arrays, Problem
from parity_tests.engine.results import Results
from parity_tests.engine.traces.hyperparameters import hyperparameters_of
from parity_tests.engine.traces.trace import FORWARD, Call, Direction, Trace, map_arrays

Nodes = dict[Any, Call | None]
"""For a node of torch's graph, the call that outputs it; None if a call takes it as an input."""


def trace_torch(
    problem: Problem,
    run: Callable[[Prepare], Results],
    *,
    is_forward: bool = False,
    outputs: Mapping[int, Arrays] = MappingProxyType({}),
) -> Trace:
    """The calls of the torch side; with `is_forward`, only those of the forward pass.

    `outputs` has, by the index of a call, arrays that the call gives instead of its own.
    """
    trace = Trace(is_forward=is_forward)
    owners = weight_owners(problem.twin)
    with trace.running(trace.begin("", "run")):
        results = run(lambda twin: add_hooks(twin, owners, trace, outputs))
    return trace.finish(problem, results.forward if is_forward else results)


def add_hooks(
    twin: torch.nn.Module,
    owners: Mapping[str, str],
    trace: Trace,
    outputs: Mapping[int, Arrays],
) -> None:
    """Registers hooks that record the inputs, outputs and gradients of each call of a submodule.

    Each floating tensor is copied at each call, so that its gradient comes from this call alone.
    """
    observed = partial(observe, trace, {})
    for name, module in twin.named_modules():
        prefix = f"{name}." if name else ""
        keys = frozenset(owner for key, owner in owners.items() if key.startswith(prefix))

        def before(module, args, kwargs, name=name, keys=keys):
            # The module may have been switched to training mode since the hooks were registered.
            call = trace.begin(
                name,
                type(module).__name__,
                function=_function_name(module.forward),
                weights=keys,
                hyperparameters=hyperparameters_of(module),
            )
            trace.open_calls.append(call)
            return observed(call, "inputs", "input gradients", (args, kwargs))

        def after(module, args, kwargs, result):
            call = trace.open_calls.pop()
            others = _as_tensors(outputs.get(call.index, {}))
            result = map_arrays(result, others.get, torch.is_tensor) if others else result
            return observed(call, "outputs", "output gradients", result)

        with contextlib.suppress(RuntimeError):  # a scripted submodule takes no Python hooks
            module.register_forward_pre_hook(before, with_kwargs=True)
            module.register_forward_hook(after, with_kwargs=True)


def _function_name(function: Callable[..., Any]) -> str:
    """The name of a function, with its module."""
    return f"{function.__module__}.{getattr(function, '__qualname__', '')}"


def observe(trace: Trace, nodes: Nodes, call: Call, forward: str, backward: str, tree: Any) -> Any:
    """The same tree, whose values and gradients the trace keeps in these two slots of the call.

    The outputs that the inputs are computed from are found in torch's graph.
    """

    def observe_tensor(label: str, x: torch.Tensor) -> torch.Tensor:
        trace.keep(call, forward, label, as_array(x))
        if x.is_floating_point():
            call.dtypes[forward][label] = str(x.dtype).removeprefix("torch.")
        if not x.requires_grad or not torch.is_grad_enabled():
            return x
        call.differentiated.add((forward, label))
        if forward == "inputs":
            call.sources |= {*producers(x, nodes)}
        x = x.clone()
        nodes[x.grad_fn] = call if forward == "outputs" else None
        x.register_hook(lambda g: trace.keep(call, backward, label, as_array(g)))
        return x

    return map_arrays(tree, observe_tensor, torch.is_tensor)


def trace_with(problem: Problem, index: int, outputs: Arrays) -> Trace:
    """The calls of the forward pass in float64, if the call at this index gives other outputs."""
    run = partial(forward, problem)
    return trace_torch(problem, run, is_forward=True, outputs={index: outputs})


def run_again(
    problem: Problem,
    index: int,
    direction: Direction,
    replacements: Sequence[Arrays],
) -> list[Arrays]:
    """Runs the call at this index again in float64, once for each of the replacements.

    Its arrays replace the inputs or, backward, the output gradients that have their labels. Returns
    the outputs or the input gradients of each run.
    """
    found: list[Arrays] = []
    indices = itertools.count(1)  # 0 is the whole run

    def before(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        if next(indices) == index:
            for arrays in replacements:
                found.append(_run_with(module, (args, kwargs), direction, _as_tensors(arrays)))

    def prepare(twin: torch.nn.Module) -> None:
        for module in twin.modules():
            with contextlib.suppress(RuntimeError):
                module.register_forward_pre_hook(before, with_kwargs=True)

    forward(problem, prepare)
    return found[: len(replacements)]


def _run_with(
    module: torch.nn.Module,
    inputs: Any,
    direction: Direction,
    others: Mapping[str, torch.Tensor],
) -> Arrays:
    """Runs a module with other arrays in place of those that it takes under some labels."""
    is_forward = direction is FORWARD
    leaves: dict[str, torch.Tensor] = {}
    results: dict[str, torch.Tensor] = {}

    def leaf(name: str, x: torch.Tensor) -> torch.Tensor:
        x = others[name] if is_forward and name in others else x.detach()
        leaves[name] = x.clone().requires_grad_(x.is_floating_point() and not is_forward)
        return leaves[name]

    args, kwargs = map_arrays(inputs, leaf, torch.is_tensor)
    with torch.set_grad_enabled(not is_forward):
        map_arrays(module(*args, **kwargs), results.setdefault, torch.is_tensor)
    if is_forward:
        return {name: as_array(x) for name, x in results.items()}
    differentiated = {name: x for name, x in leaves.items() if x.requires_grad}
    gradients = torch.autograd.grad(
        [results[label] for label in others],
        [*differentiated.values()],
        [*others.values()],
        allow_unused=True,
    )
    named_gradients = zip(differentiated, gradients, strict=True)
    return {name: as_array(gradient) for name, gradient in named_gradients if gradient is not None}


def producers(x: torch.Tensor, nodes: Nodes) -> Iterator[Call]:
    """The calls from whose outputs a tensor is computed without another call, by torch's graph."""
    seen, pending = set(), [x.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node not in nodes:
            pending += [before for before, _ in node.next_functions]
        elif (call := nodes[node]) is not None:
            yield call


def _as_tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    return {k: torch.from_numpy(np.ascontiguousarray(a)) for k, a in arrays.items()}


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor as an array, in float64 if it is floating."""
    tensor = tensor.detach().cpu().resolve_conj()
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()
