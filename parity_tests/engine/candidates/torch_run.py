"""Run a torch module, forward and backward."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch

from jax_models.weights.stored import as_numpy
from parity_tests.engine.bounds.torch_rounding import InFloat64, RandomRounding
from parity_tests.engine.candidates.torch_module import cast, converted, in_double, tensors, twin_in
from parity_tests.engine.problem import Problem, is_flag
from parity_tests.engine.results import (
    Results,
    are_same,
    cotangents,
    grouped,
    named_leaves,
    without_padding,
)

Prepare = Callable[[torch.nn.Module], object]
"""Changes the copy of the twin before it runs."""


def run_oracle(problem: Problem, prepare: Prepare = lambda twin: None) -> tuple[Results, InFloat64]:
    """The results of `run_torch` in float64 throughout, and the mode with what it recorded."""
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
    twin = twin_in(problem.twin, dtype)
    prepare(twin)
    return _run_twin(problem, twin, tensors(problem.inputs, dtype))


def run_torch_rounded(
    problem: Problem,
    dtype: str,
    seed: int,
    decisions: Sequence[torch.Tensor],
    prepare: Prepare = lambda twin: None,
) -> Results:
    """As `run_torch`, in float64, with each operation's result rounded to a dtype at random."""
    twin = converted(problem.twin, lambda tensor: cast(cast(tensor, dtype), "float64"))
    prepare(twin)
    with RandomRounding(dtype, seed, decisions):
        return _run_twin(problem, twin, in_double(tensors(problem.inputs, dtype)))


def result_dtypes(problem: Problem, dtype: str) -> dict[tuple[str, str], np.dtype]:
    """The dtypes of the torch side's results, with its own casts, by group and name.

    Empty if torch raises an error because float64 meets an array that the module casts to less.
    """
    twin, inputs = twin_in(problem.twin, dtype), tensors(problem.inputs, dtype)
    try:
        with torch.no_grad(), same_draws(problem), eager():
            groups = grouped(problem.call_twin(twin, *inputs), "torch", as_array)
    except RuntimeError:
        return {}
    return {
        (group, name): as_numpy(leaf[..., :0] if leaf.ndim else leaf).dtype
        for group, named in groups.items()
        for name, leaf in named.items()
    }


def changes_result(problem: Problem, keys: Sequence[str]) -> bool:
    """Whether the results of the torch side change if 1 is added to these weights."""

    def change(twin: torch.nn.Module) -> None:
        weights = twin.state_dict()
        for key in keys:
            weights[key] += 1

    return not are_same(forward(problem), forward(problem, change))


def forward(problem: Problem, prepare: Prepare = lambda twin: None) -> Results:
    """The torch side's result in float64."""
    twin, inputs = twin_in(problem.twin, "float64"), tensors(problem.inputs, "float64")
    with torch.no_grad(), same_draws(problem), eager(), InFloat64():
        prepare(twin)
        groups = grouped(problem.call_twin(twin, *inputs), "torch", as_array)
    return Results(
        {group: {name: _numpy(t) for name, t in named.items()} for group, named in groups.items()}
    )


def eager() -> contextlib.AbstractContextManager[Any]:
    """A context in which modules that `torch.compile` wrapped run uncompiled."""
    return torch.compiler.set_stance("force_eager")


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
def same_draws(problem: Problem) -> Iterator[None]:
    """A context in which each run draws the same random numbers, with a generator of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(problem.seed)
        yield


def _run_twin(problem: Problem, twin: torch.nn.Module, inputs: Any) -> Results:
    for leaf in tensors_in(inputs):
        leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())
    # the module may write into what it is given
    given = jax.tree.map(lambda leaf: leaf if is_flag(leaf) else leaf.clone(), inputs)
    with same_draws(problem), eager():
        groups = grouped(problem.call_twin(twin, *given), "torch", as_array)
    results = Results(
        {group: {name: _numpy(t) for name, t in named.items()} for group, named in groups.items()}
    )
    results.without_gradient = frozenset(
        (group, name)
        for group, named in groups.items()
        for name, t in named.items()
        if not t.requires_grad
    )
    results.padding = {} if problem.has_padding_gradients else padding_rows(twin)
    pairs = [
        (t, torch.tensor(cotangent, dtype=t.dtype))
        for t, cotangent in zip(
            (
                t
                for named in groups.values()
                for t in named.values()
                if t.is_floating_point() or t.is_complex()
            ),
            cotangents(problem.seed, results),
            strict=True,
        )
        if t.requires_grad
    ]
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
    without_padding(results, results.padding)
    return results


def padding_rows(twin: torch.nn.Module) -> dict[str, set[int]]:
    """The rows of embeddings whose gradient torch drops (`padding_idx`), by the weights' names."""
    rows: dict[int, set[int]] = {}
    for module in twin.modules():
        padding = getattr(module, "padding_idx", None)
        weight = getattr(module, "weight", None)
        if isinstance(padding, int) and isinstance(weight, torch.Tensor):
            rows.setdefault(id(weight), set()).add(padding)
    return {
        name: rows[id(weight)]
        for name, weight in twin.named_parameters(remove_duplicate=False)
        if id(weight) in rows
    }


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves."""
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, torch.Tensor)]


def as_array(leaf: Any) -> torch.Tensor | None:
    """The leaf as a dense tensor; None if it is not one."""
    if isinstance(leaf, torch.Tensor):
        return leaf if leaf.layout == torch.strided else leaf.to_dense()
    is_number = isinstance(leaf, np.ndarray | np.generic) or type(leaf) in (bool, int, float)
    return torch.as_tensor(leaf) if is_number else None


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return _shared(tensor.clone())


def _gradient(tensor: torch.Tensor) -> np.ndarray:
    """The gradient as an array; zeros if nothing depends on the tensor, as in JAX."""
    if tensor.grad is None:
        return np.zeros(tensor.shape)
    return _shared(tensor.grad.to_dense() if tensor.grad.is_sparse else tensor.grad)


def _shared(tensor: torch.Tensor) -> np.ndarray:
    """The tensor as an array that shares its memory."""
    return as_numpy(tensor.detach().cpu().resolve_conj().resolve_neg())
