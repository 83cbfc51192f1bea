"""Copies a torch module in a dtype, and runs it forward and backward."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch.utils._pytree import tree_map

from jax_models.checks.values import described
from jax_models.weights.stored import as_numpy
from parity_tests.engine.bounds.torch_rounding import InFloat64, RandomRounding
from parity_tests.engine.problem import COMPLEX, Problem, is_flag
from parity_tests.engine.results import (
    Results,
    are_same,
    clear_padding_gradients,
    cotangents,
    leaves_by_group,
    named_leaves,
)

Groups = dict[str, dict[str, torch.Tensor]]
"""Tensors by group and name."""
Prepare = Callable[[torch.nn.Module], object]
"""A function that changes the copy of the twin before the copy runs."""


def run_oracle(
    problem: Problem, prepare: Prepare = lambda twin: None, mode: InFloat64 | None = None
) -> tuple[Results, InFloat64]:
    """The results of `run_torch` entirely in float64, and the mode with the facts it recorded."""
    try:
        with mode or InFloat64() as mode:
            results = run_torch(problem, "float64", prepare)
    except RuntimeError as error:
        if "dtype" not in str(error):
            raise
        raise TypeError(
            f"torch: {error}: some tensors of the module are not cast to float64: make them "
            "buffers, or give them the inputs' dtype"
        ) from error
    return results, mode


def run_torch(problem: Problem, dtype: str, prepare: Prepare = lambda twin: None) -> Results:
    """The torch side's results, and the gradients for random cotangents."""
    twin = twin_in_dtype(problem.twin, dtype)
    prepare(twin)
    return _run_twin(problem, twin, tensors(problem.inputs, dtype))


def run_torch_rounded(
    problem: Problem,
    dtype: str,
    seed: int,
    decisions: Sequence[torch.Tensor],
    prepare: Prepare = lambda twin: None,
) -> Results:
    """The results of `run_torch` in float64, if each operation is rounded to a dtype at random."""
    twin = convert_tensors(problem.twin, lambda tensor: cast(cast(tensor, dtype), "float64"))
    prepare(twin)
    with RandomRounding(dtype, seed, decisions):
        return _run_twin(problem, twin, in_float64(tensors(problem.inputs, dtype)))


def affects_result(problem: Problem, key: str) -> bool:
    """True if the results of the torch side change when 1 is added to a weight."""

    def change(twin: torch.nn.Module) -> None:
        twin.state_dict()[key].add_(1)

    return not are_same(forward(problem), forward(problem, change))


def forward(problem: Problem, prepare: Prepare = lambda twin: None) -> Results:
    """The torch side's result in float64, without gradients."""
    twin, inputs = twin_in_dtype(problem.twin, "float64"), tensors(problem.inputs, "float64")
    with torch.no_grad(), InFloat64():
        prepare(twin)
        return _results(_call_twin(problem, twin, inputs))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """A context in which torch uses one thread and leaves the other cores to JAX."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def reproducible(problem: Problem) -> Iterator[None]:
    """A context in which each run draws the same random numbers, from a generator of its own.

    Modules that `torch.compile` wrapped run uncompiled.
    """
    with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
        torch.manual_seed(problem.seed)
        yield


def _call_twin(problem: Problem, twin: torch.nn.Module, inputs: Any) -> Groups:
    """The tensors that the twin returns for these inputs, by group and name."""
    with reproducible(problem):
        return leaves_by_group(problem.call_twin(twin, *inputs), "torch", as_array)


def _results(groups: Groups) -> Results:
    return Results(
        {group: {n: _numpy(t.clone()) for n, t in named.items()} for group, named in groups.items()}
    )


def _run_twin(problem: Problem, twin: torch.nn.Module, inputs: Any) -> Results:
    """The results, and the gradients for random cotangents."""
    # Run on copies of the inputs, because the module may write into what it is given.
    numbers = [leaf for leaf in jax.tree.leaves(inputs) if isinstance(leaf, torch.Tensor)]
    for leaf in numbers:
        leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())
    given = jax.tree.map(lambda leaf: leaf if is_flag(leaf) else leaf.clone(), inputs)
    groups = _call_twin(problem, twin, given)
    results = _results(groups)
    named_tensors = {(g, name): t for g, named in groups.items() for name, t in named.items()}
    results.without_gradient = frozenset(
        place for place, t in named_tensors.items() if not t.requires_grad
    )
    results.padding = {} if problem.has_padding_gradients else padding_rows(twin)

    # Cotangents are drawn even for results that torch cannot differentiate, so that both sides draw
    # the same numbers.
    floating = [t for t in named_tensors.values() if t.is_floating_point() or t.is_complex()]
    drawn = zip(floating, cotangents(problem.seed, results), strict=True)
    pairs = [(t, torch.tensor(c, dtype=t.dtype)) for t, c in drawn if t.requires_grad]
    if not pairs:
        return results
    torch.autograd.backward([t for t, _ in pairs], [cotangent for _, cotangent in pairs])
    results["input gradient"] = {
        name: _gradient(t)
        for i, tree in enumerate(inputs)
        for name, t in named_leaves(tree, f"input {i}").items()
        if isinstance(t, torch.Tensor) and t.requires_grad
    }
    results["weight gradients"] = {
        name: _gradient(weight)
        for name, weight in twin.named_parameters(remove_duplicate=False)
        if weight.requires_grad
    }
    clear_padding_gradients(results, results.padding)
    return results


def padding_rows(twin: torch.nn.Module) -> dict[str, set[int]]:
    """The rows of each embedding whose gradients torch drops (`padding_idx`), by weight name."""
    rows: dict[int, set[int]] = {}
    for module in twin.modules():
        padding = getattr(module, "padding_idx", None)
        if isinstance(padding, int):
            rows.setdefault(id(getattr(module, "weight", None)), set()).add(padding)
    named = twin.named_parameters(remove_duplicate=False)
    return {name: rows[id(weight)] for name, weight in named if id(weight) in rows}


def as_array(leaf: Any) -> torch.Tensor | None:
    """The leaf as a dense tensor; None if it is not one."""
    if isinstance(leaf, torch.Tensor):
        return leaf if leaf.layout == torch.strided else leaf.to_dense()
    is_number = isinstance(leaf, np.ndarray | np.generic) or type(leaf) in (bool, int, float)
    return torch.as_tensor(leaf) if is_number else None


def _gradient(tensor: torch.Tensor) -> np.ndarray:
    """The gradient as an array; zeros if nothing depends on the tensor, as in JAX."""
    if tensor.grad is None:
        return np.zeros(tensor.shape)
    return _numpy(tensor.grad.to_dense() if tensor.grad.is_sparse else tensor.grad)


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    """The tensor as an array that shares its memory."""
    return as_numpy(tensor.detach().cpu().resolve_conj().resolve_neg())


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
        raise TypeError(f"twin: expected a torch.nn.Module, got {described(twin)}")
    if any(weight.is_meta for weight in twin.state_dict().values()):
        raise ValueError("twin: expected weights, got a module on the device meta, which has none")
    return convert_tensors(twin, torch.Tensor.cpu).eval()


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

    # Torch cannot copy computed tensors, because they belong to a graph, so detach them.
    detached = {
        id(value): value.detach().clone()
        for module in twin.modules()
        if not isinstance(module, torch.jit.ScriptModule)
        for value in vars(module).values()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    }
    copied = copy.deepcopy(twin, detached)
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
