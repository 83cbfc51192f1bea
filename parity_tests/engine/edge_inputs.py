"""Compare where functions have kinks: at zeros, ties and extremes, and with full or empty masks."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parity_tests.engine.candidates.adapters import is_floating
from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.candidates.torch_module import tensors, twin_in
from parity_tests.engine.candidates.torch_run import eager, run_oracle, same_draws
from parity_tests.engine.problem import Problem, is_flag
from parity_tests.engine.references.torch_reference import measure_twin

LARGE = 1024.0
"""The factor for extreme inputs: the exponential of most of them overflows, even in float64."""

FLOATING: dict[str, Callable[[np.random.Generator, np.ndarray], np.ndarray]] = {
    "zeros": lambda rng, x: np.zeros_like(x),
    "zeros among others": lambda rng, x: np.where(rng.random(x.shape) < 0.5, 0, x),
    "ties": lambda rng, x: np.round(x),
    "extremes": lambda rng, x: LARGE * x,
}
ALL_HIDDEN = "masks all false"
"""If everything is masked, the result is not defined, so a difference is a note and no fault."""
OTHERS: dict[str, tuple[Any, Any]] = {
    "the largest integers, masks all true": (
        lambda n, lookup: np.full_like(n, lookup.size - 1 if lookup else n.max(initial=0)),
        np.ones_like,
    ),
    "the smallest integers, masks true at the first place alone": (
        lambda n, lookup: np.full_like(n, 0 if lookup else n.min(initial=0)),
        lambda n: np.broadcast_to(np.arange(n.shape[-1] if n.ndim else 1) == 0, n.shape),
    ),
    ALL_HIDDEN: (lambda n, lookup: n, np.zeros_like),
}
"""How integers and masks (booleans, or 0 and 1) change. The functions of integers also get the
embedding that reads them, if any."""
NUDGE = 1e-9


def edge_problems(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Yields a description of edge inputs, and the problem with such inputs of the same shapes."""
    arrays = [leaf for leaf in jax.tree.leaves(problem.inputs) if not is_flag(leaf)]
    if any(np.issubdtype(array.dtype, np.inexact) for array in arrays):
        for name, change in FLOATING.items():
            rng = np.random.default_rng(problem.seed)
            yield name, with_floating(problem, partial(change, rng))
        if problem.to_torch is not None:
            zeros = with_floating(problem, np.zeros_like)
            yield (
                "zeros, biases zero",
                dataclasses.replace(zeros, twin=without_biases(problem.twin)),
            )
    if not all(np.issubdtype(array.dtype, np.inexact) for array in arrays):
        lookups = embedding_lookups(problem)
        for name, (of_integers, of_masks) in OTHERS.items():
            yield name, with_others(problem, lookups, of_integers, of_masks)
        if any(lookup is not None and lookup.padding >= 0 for lookup in lookups):
            rng = np.random.default_rng(problem.seed)
            padded = with_others(problem, lookups, partial(_padded, rng), lambda n: n)
            yield (
                "padding_idx among other integers",
                dataclasses.replace(padded, has_padding_gradients=True),
            )


LOOKUPS = ("aten::embedding", "aten::_embedding_bag", "aten::_embedding_bag_forward_only")
"""The operations of torch that read rows of an embedding; the last one, of a frozen embedding."""


class Lookup(NamedTuple):
    """An embedding that reads an input: its number of rows, and its padding row or -1."""

    size: int
    padding: int


class Lookups(TorchDispatchMode):
    """Records the indices that embeddings read, and the embeddings."""

    def __init__(self):
        super().__init__()
        self.found: list[tuple[torch.Tensor, Lookup]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note its indices if it is a lookup."""
        if func.name() in LOOKUPS:
            given = {a.name: a.default_value for a in func._schema.arguments}
            given |= dict(zip(given, args, strict=False)) | (kwargs or {})
            lookup = Lookup(len(given["weight"]), given["padding_idx"])
            self.found.append((given["indices"], lookup))
        return func(*args, **(kwargs or {}))


def lookups_of(problem: Problem) -> list[tuple[torch.Tensor, Lookup]]:
    """The indices and embeddings of the torch side's lookups."""
    twin, inputs = twin_in(problem.twin, "float64"), tensors(problem.inputs, "float64")
    with torch.no_grad(), same_draws(problem), eager(), Lookups() as lookups:
        problem.call_twin(twin, *inputs)
    return lookups.found


def embedding_lookups(problem: Problem) -> list[Lookup | None]:
    """For each leaf of the inputs, the smallest embedding that reads it, or None.

    An embedding reads a leaf if its indices are numbers of the leaf and change when the leaf does.
    """
    leaves, structure = jax.tree.flatten(problem.inputs)
    before = lookups_of(problem)

    def lookup(i: int, leaf: Any) -> Lookup | None:
        if not before or is_flag(leaf) or leaf.dtype.kind not in "iu" or not leaf.size:
            return None
        constant = [*leaves[:i], np.full_like(leaf, leaf.flat[0]), *leaves[i + 1 :]]
        inputs = jax.tree.unflatten(structure, constant)
        after = lookups_of(dataclasses.replace(problem, inputs=inputs))
        read = [
            lookup
            for (indices, lookup), (changed, _) in zip(before, after, strict=False)
            if not torch.equal(indices, changed) and np.isin(indices.numpy(), leaf).all()
        ]
        return min(read, default=None)

    return [lookup(i, leaf) for i, leaf in enumerate(leaves)]


def with_others(
    problem: Problem,
    lookups: Sequence[Lookup | None],
    of_integers: Callable[[np.ndarray, Lookup | None], np.ndarray],
    of_masks: Callable[[np.ndarray], np.ndarray],
) -> Problem:
    """The problem with its integers and masks changed; `lookups` has one entry for each leaf."""
    leaves, structure = jax.tree.flatten(problem.inputs)

    def changed(leaf: Any, lookup: Lookup | None) -> Any:
        if is_flag(leaf) or is_floating(leaf):
            return leaf
        is_integers = lookup is not None or not is_mask(leaf)
        return (of_integers(leaf, lookup) if is_integers else of_masks(leaf)).astype(leaf.dtype)

    changed_leaves = [*map(changed, leaves, lookups)]
    return dataclasses.replace(problem, inputs=jax.tree.unflatten(structure, changed_leaves))


def _padded(rng: np.random.Generator, n: np.ndarray, lookup: Lookup | None) -> np.ndarray:
    """The integers, half of them the embedding's padding."""
    if lookup is None or lookup.padding < 0:
        return n
    return np.where(rng.random(n.shape) < 0.5, lookup.padding, n)


def is_mask(array: np.ndarray) -> bool:
    """True if the array holds booleans, or only 0 and 1."""
    return array.dtype == bool or bool(np.isin(array, (0, 1)).all())


def with_floating(problem: Problem, change: Callable[[np.ndarray], np.ndarray]) -> Problem:
    """The problem with its floating inputs changed."""

    def leaf(array: Any) -> Any:
        return change(array) if not is_flag(array) and is_floating(array) else array

    return dataclasses.replace(problem, inputs=jax.tree.map(leaf, problem.inputs))


def is_picked(problem: Problem) -> bool:
    """True if torch picks one of several equals, by a sort, say, and a tiny nudge changes which."""
    rng = np.random.default_rng(problem.seed)

    def nudged(x: np.ndarray) -> np.ndarray:
        return x + NUDGE * rng.standard_normal(x.shape)

    picks = []
    for each in (problem, with_floating(problem, nudged)):
        _, mode = run_oracle(each)
        picks.append([d for d in mode.decisions if d.dtype != torch.bool])
    return len(picks[0]) != len(picks[1]) or not all(map(torch.equal, *picks))


def without_biases(twin: torch.nn.Module) -> torch.nn.Module:
    """A copy whose biases are zero, so that inputs of zeros stay zeros in inner layers."""
    twin = twin_in(twin, "float64")
    with torch.no_grad():
        for name, weight in twin.named_parameters():
            if "bias" in name.rpartition(".")[2]:
                weight.zero_()
    return twin


def measure_edges(
    problem: Problem, platform: str, jax_side: JaxSide
) -> tuple[list[str], list[str]]:
    """Faults for what differs at edge inputs in float64, and notes on what was compared."""
    faults, compared, told = [], [], []
    for name, edge in edge_problems(problem):
        try:
            report = measure_twin(edge, ["float64"], platform, jax_side=jax_side)
        except Exception as error:  # a module may refuse such inputs
            told.append(f"edge inputs, {name}: not compared, {type(error).__name__}")
            continue
        if not report.errors and any("torch side are not finite" in f for f in report.faults):
            told.append(f"edge inputs, {name}: not compared, torch's results are not finite")
            continue
        compared.append(name)
        found = [f"edge inputs, {name}: {fault}" for fault in report.faults]
        found += [
            f"edge inputs, {name}: {group} differ by {error.jax:.1e}, where {error.bound:.1e} is "
            f"allowed, worst in {error.tensor}"
            for _, group, error in report.failures
            if error.verdict == "FAIL"
        ]
        if found and name == ALL_HIDDEN:
            told += found
        elif found and is_picked(edge):
            told += [f"{fault}; torch picks one of several equals there" for fault in found]
        else:
            faults += found
    return faults, [f"edge inputs were compared: {'; '.join(compared) or 'none'}", *told]
