"""Run a torch module, forward and backward."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jax_models.weights.stored import as_numpy
from parity_tests.engine.bounds.torch_rounding import InFloat64, RandomRounding
from parity_tests.engine.candidates.torch_module import (
    cast,
    convert_tensors,
    in_float64,
    tensors,
    twin_in_dtype,
)
from parity_tests.engine.problem import Problem, is_flag
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


def run_oracle(problem: Problem, prepare: Prepare = lambda twin: None) -> tuple[Results, InFloat64]:
    """The results of `run_torch` entirely in float64, and the mode with the facts it recorded."""
    try:
        with InFloat64() as mode:
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


def result_dtypes(problem: Problem, dtype: str) -> dict[tuple[str, str], np.dtype]:
    """The dtypes of the torch side's results, with its own casts, by group and name.

    Empty if torch raises an error, because float64 arrays meet arrays that the module casts to a
    coarser dtype.
    """
    try:
        with torch.no_grad():
            twin, inputs = twin_in_dtype(problem.twin, dtype), tensors(problem.inputs, dtype)
            groups = _call_twin(problem, twin, inputs)
    except RuntimeError:
        return {}
    return {
        (group, name): jnp.dtype(str(leaf.dtype).removeprefix("torch."))
        for group, named in groups.items()
        for name, leaf in named.items()
    }


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
