"""Copy torch modules in a dtype, and find the weights that have several keys."""

import copy
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from torch.utils._pytree import tree_map

from parity_tests.engine.problem import COMPLEX, is_flag, kind_of


def tensors(tree: Any, dtype: str) -> Any:
    """The tree of arrays as tensors, with the floating ones in a dtype."""

    def tensor(array: Any) -> Any:
        return array if is_flag(array) else cast(torch.tensor(np.asarray(array)), dtype)

    return jax.tree.map(tensor, tree)


def cast(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """The tensor, cast to a dtype if it is floating; a complex one is cast to a complex dtype."""
    if tensor.is_complex():
        return tensor.to(getattr(torch, COMPLEX[dtype]))
    return tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor


def in_float64(tree: Any) -> Any:
    """The floating tensors of a tree in float64."""
    return jax.tree.map(lambda leaf: leaf if is_flag(leaf) else cast(leaf, "float64"), tree)


def weight_owners(twin: torch.nn.Module) -> dict[str, str]:
    """For each key of a real or complex weight or buffer, the first of the keys that share it."""
    first: dict[int, str] = {}
    return {
        key: first.setdefault(id(weight), key)
        for key, weight in twin.state_dict(keep_vars=True).items()
        if weight.is_floating_point() or weight.is_complex()
    }


def checked_twin(twin: Any) -> torch.nn.Module:
    """A copy of a torch module on the CPU, in evaluation mode."""
    if not isinstance(twin, torch.nn.Module):
        raise TypeError(f"twin: expected a torch.nn.Module, got {kind_of(twin)}")
    if any(weight.is_meta for weight in twin.state_dict().values()):
        raise ValueError("twin: expected weights, got a module on the device meta, which has none")
    return convert_tensors(twin, torch.Tensor.cpu).eval()


def copy_of(twin: torch.nn.Module) -> torch.nn.Module:
    """A copy of the module, including computed tensors that it holds as attributes.

    Torch cannot copy such tensors, because they belong to a graph, so they are detached.
    """
    memo = {
        id(value): value.detach().clone()
        for module in twin.modules()
        if not isinstance(module, torch.jit.ScriptModule)
        for value in vars(module).values()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    }
    return copy.deepcopy(twin, memo)


def twin_in_dtype(twin: torch.nn.Module, dtype: str) -> torch.nn.Module:
    """A copy of the module in a dtype, including tensors that it holds as plain attributes."""
    return convert_tensors(twin, lambda tensor: cast(tensor, dtype))


def convert_tensors(
    twin: torch.nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]
) -> torch.nn.Module:
    """A copy of the module in which all tensors are converted."""

    def attribute(value: Any) -> Any:
        is_plain = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
        return convert(value) if is_plain else value

    copied = copy_of(twin)
    is_scripted = any(isinstance(module, torch.jit.ScriptModule) for module in copied.modules())
    if not is_scripted:
        copied._apply(convert)
    for module in copied.modules():
        if isinstance(module, torch.jit.ScriptModule):
            # a script keeps its own references to tensors, so each one must be set anew
            for name, weight in [*module.named_parameters(recurse=False)]:
                weight = torch.nn.Parameter(convert(weight.detach()), weight.requires_grad)
                setattr(module, name, weight)
            for name, buffer in [*module.named_buffers(recurse=False)]:
                setattr(module, name, convert(buffer))
            continue
        if is_scripted:
            module._apply(convert, recurse=False)
        for name, value in vars(module).items():
            if name[:1] != "_" or isinstance(value, torch.Tensor):
                vars(module)[name] = tree_map(attribute, value)
    return copied
