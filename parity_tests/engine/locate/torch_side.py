"""The calls of a torch module's submodules."""

import contextlib
import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from parity_tests.engine.locate.record import Call, Trace, mapped


def weight_owners(twin: torch.nn.Module) -> dict[str, str]:
    """The key of each floating weight or buffer, or the first of the keys that share it."""
    first: dict[int, str] = {}
    return {
        key: first.setdefault(id(weight), key)
        for key, weight in twin.state_dict(keep_vars=True).items()
        if weight.is_floating_point()
    }


def hooked(twin: torch.nn.Module, trace: Trace) -> torch.nn.Module:
    """A copy of the module whose submodules tell the trace what they take and return.

    Each floating tensor passes through a copy of its own, so that its gradient is that of this call
    alone.
    """
    twin = copy.deepcopy(twin)
    owners = weight_owners(twin)
    shapes = {key: tuple(weight.shape) for key, weight in twin.state_dict().items()}
    for name, module in twin.named_modules():
        prefix = f"{name}." if name else ""
        keys = frozenset(owner for key, owner in owners.items() if key.startswith(prefix))
        fields = {"weights": keys, "shapes": tuple(sorted(shapes[key] for key in keys))}

        def before(module, args, kwargs, name=name, fields=fields):
            call = trace.begin(name, type(module).__name__, **fields)
            trace.open.append(call)
            return observe(trace, call, "inputs", "input gradients", (args, kwargs))

        def after(module, args, kwargs, result):
            call = trace.open.pop()
            return observe(trace, call, "outputs", "output gradients", result)

        with contextlib.suppress(RuntimeError):  # a scripted submodule is not called from Python
            module.register_forward_pre_hook(before, with_kwargs=True)
            module.register_forward_hook(after, with_kwargs=True)
    return twin


def observe(trace: Trace, call: Call, forward: str, backward: str, tree: Any) -> Any:
    """The same tensors, whose values and gradients the trace keeps as these slots of the call."""

    def one(label: str, x: torch.Tensor) -> torch.Tensor:
        trace.keep(call, forward, label, as_array(x))
        if x.is_floating_point():
            call.dtypes[forward, label] = str(x.dtype).removeprefix("torch.")
        if not x.requires_grad or not torch.is_grad_enabled():
            return x
        if forward == "inputs":
            call.sources |= givers(x, trace.nodes)
        x = x.clone()
        trace.nodes[x.grad_fn] = call if forward == "outputs" else None
        x.register_hook(lambda g: trace.keep(call, backward, label, as_array(g)))
        return x

    return mapped(tree, one, lambda value: isinstance(value, torch.Tensor))


def givers(x: torch.Tensor, nodes: Mapping[Any, Call | None]) -> set[Call]:
    """The last calls that a tensor is computed from, by torch's graph of the computation."""
    found, seen, left = set(), set(), [x.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node not in nodes:
            left += [before for before, _ in node.next_functions]
        elif (call := nodes[node]) is not None:
            found.add(call)
    return found


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Its numbers, the floating ones in float64."""
    tensor = tensor.detach().cpu().resolve_conj()
    if tensor.is_floating_point():
        tensor = tensor.double()
    return tensor.numpy().copy()


def marked(twin: torch.nn.Module) -> tuple[torch.nn.Module, dict[float, str]]:
    """A copy of the module, each of whose weights is filled with one number, and whose it is."""
    twin = copy.deepcopy(twin)
    keys = [*dict.fromkeys(weight_owners(twin).values())]
    steps = np.random.default_rng(0).choice(2**22, len(keys), replace=False)
    marks = {0.5 + float(step) / 2**23: key for key, step in zip(keys, steps, strict=True)}
    state = twin.state_dict(keep_vars=True)
    with torch.no_grad():
        for mark, key in marks.items():
            state[key].fill_(mark)
    return twin, marks
