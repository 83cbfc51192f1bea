"""Compares on inputs where functions have kinks: zeros, ties, extremes, and full or empty masks."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parity_tests.engine.bounds.tolerance import UNDETERMINED, ulp
from parity_tests.engine.bounds.torch_decisions import is_real
from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.candidates.torch_run import forward, run_oracle, twin_in_dtype
from parity_tests.engine.problem import Problem, in_one_line, is_flag, is_inexact
from parity_tests.engine.references.torch_reference import TorchReference
from parity_tests.engine.results import not_finite
from parity_tests.engine.verdict.measure import measure

LARGE = 2.0 ** np.ceil(np.log2(np.log(np.finfo(np.float64).max)))
"""The first power of two whose exponential overflows even in float64."""
NUDGE = ulp(np.float64) ** 0.5
"""A change far above the rounding of equal numbers, and far below the distance of other numbers."""
LOOKUPS = ("aten::embedding", "aten::_embedding_bag", "aten::_embedding_bag_forward_only")
"""The operations of torch that read rows of an embedding; the last one is for frozen embeddings."""


class Lookup(NamedTuple):
    """An embedding that reads an input: its number of rows, and its padding row or -1."""

    size: int
    padding: int


def largest_rows(n: np.ndarray, lookup: Lookup | None, _: Any) -> np.ndarray:
    """The largest of the integers or, for an embedding, its last row that the dtype can index."""
    if lookup is None:
        return np.full_like(n, n.max(initial=0))
    return np.full_like(n, min(lookup.size - 1, np.iinfo(n.dtype).max))


MASKED, PADDING = "masks all false", "padding_idx among other integers"
EDGES: dict[str, dict[str, Callable[..., np.ndarray]]] = {
    "zeros": {"floating": lambda x, *_: np.zeros_like(x)},
    "zeros among others": {"floating": lambda x, _, rng: np.where(rng.random(x.shape) < 0.5, 0, x)},
    "ties": {"floating": lambda x, *_: np.round(x)},
    "extremes": {"floating": lambda x, *_: LARGE * x},
    "the largest integers, masks all true": {
        "integer": largest_rows,
        "mask": lambda n, *_: np.ones_like(n),
    },
    "the smallest integers, masks true at the first place alone": {
        "integer": lambda n, lookup, _: np.full_like(n, 0 if lookup else n.min(initial=0)),
        "mask": lambda n, *_: np.broadcast_to(
            np.arange(n.shape[-1] if n.ndim else 1) == 0, n.shape
        ),
    },
    MASKED: {"mask": lambda n, *_: np.zeros_like(n)},
    PADDING: {
        "padded": lambda n, lookup, rng: np.where(rng.random(n.shape) < 0.5, lookup.padding, n)
    },
}
"""For each kind of edge inputs, how it replaces each kind of inputs.

Floating numbers hit the kinks of relu, max and sort, or make exponentials overflow. Integers become
the first or the last row of an embedding, or its padding row, whose gradient torch drops.
"""


class Edge(NamedTuple):
    """A problem whose inputs are replaced by edge inputs of the same shapes."""

    name: str
    problem: Problem


def edges(problem: Problem) -> Iterator[Edge]:
    """Yields the problem with each kind of edge inputs that it can have."""
    leaves, structure = jax.tree.flatten(problem.inputs)
    lookups = embedding_lookups(problem)
    kinds = [*map(kinds_of_input, leaves, lookups)]
    for name, changes in EDGES.items():
        if changes.keys().isdisjoint(set().union(*kinds)):
            continue
        rng, inputs = np.random.default_rng(problem.seed), []
        for leaf, lookup, leaf_kinds in zip(leaves, lookups, kinds, strict=True):
            for change in (change for kind, change in changes.items() if kind in leaf_kinds):
                leaf = change(leaf, lookup, rng).astype(leaf.dtype)
            inputs.append(leaf)
        edge = dataclasses.replace(
            problem,
            inputs=jax.tree.unflatten(structure, inputs),
            has_padding_gradients=name == PADDING,
        )
        yield Edge(name, edge)
        if name == "zeros" and problem.to_torch is not None:
            edge = dataclasses.replace(edge, twin=without_biases(problem.twin))
            yield Edge("zeros, biases zero", edge)


def kinds_of_input(leaf: Any, lookup: Lookup | None) -> set[str]:
    """The kinds of an input: none for a flag; a mask if all numbers are 0 or 1."""
    if is_flag(leaf) or is_inexact(leaf):
        return set() if is_flag(leaf) else {"floating"}
    if lookup is not None:
        return {"integer", "padded"} if lookup.padding >= 0 else {"integer"}
    is_mask = leaf.dtype == bool or bool(np.isin(leaf, (0, 1)).all())
    return {"mask" if is_mask else "integer"}


class Lookups(TorchDispatchMode):
    """Records the indices that embeddings read, and the embeddings."""

    def __init__(self):
        super().__init__()
        self.found: list[tuple[torch.Tensor, Lookup]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and notes its indices if it is a lookup."""
        if func.name() in LOOKUPS:
            given = {a.name: a.default_value for a in func._schema.arguments}
            given |= dict(zip(given, args, strict=False)) | (kwargs or {})
            lookup = Lookup(len(given["weight"]), given["padding_idx"])
            self.found.append((given["indices"], lookup))
        return func(*args, **(kwargs or {}))


def embedding_lookups(problem: Problem) -> list[Lookup | None]:
    """For each leaf of the inputs, the smallest embedding that reads it, or None.

    An embedding reads a leaf if its indices are numbers of the leaf and change when the leaf does.
    """
    leaves, structure = jax.tree.flatten(problem.inputs)

    def lookups_with(inputs: list[Any]) -> list[tuple[torch.Tensor, Lookup]]:
        with Lookups() as lookups:
            forward(dataclasses.replace(problem, inputs=jax.tree.unflatten(structure, inputs)))
        return lookups.found

    def lookup(i: int, leaf: Any) -> Lookup | None:
        constant = [*leaves[:i], np.full_like(leaf, leaf.flat[0]), *leaves[i + 1 :]]
        read = [
            lookup
            for (indices, lookup), (others, _) in zip(lookups, lookups_with(constant), strict=False)
            if not torch.equal(indices, others) and np.isin(indices.numpy(), leaf).all()
        ]
        return min(read, default=None)

    may_index = [not is_flag(x) and x.dtype.kind in "iu" and x.size > 0 for x in leaves]
    lookups = lookups_with(leaves) if any(may_index) else []
    return [lookup(i, leaf) if lookups and may_index[i] else None for i, leaf in enumerate(leaves)]


def picks_among_equals(problem: Problem) -> bool:
    """True if torch picks one of several equal numbers, as a sort does: JAX may pick another one.

    torch does so if tiny changes of the inputs change its indices.
    """

    def picks(inputs: Any) -> list[torch.Tensor]:
        _, mode = run_oracle(dataclasses.replace(problem, inputs=inputs))
        return [each for each in mode.decisions if not (each.dtype == torch.bool or is_real(each))]

    def nudged(x: Any) -> Any:
        is_number = not is_flag(x) and is_inexact(x)
        return x + NUDGE * rng.standard_normal(x.shape) if is_number else x

    rng = np.random.default_rng(problem.seed)
    before, after = picks(problem.inputs), picks(jax.tree.map(nudged, problem.inputs))
    return len(before) != len(after) or not all(map(torch.equal, before, after))


def without_biases(twin: torch.nn.Module) -> torch.nn.Module:
    """A copy whose biases are zero, so that inputs of zeros stay zeros in inner layers."""
    twin = twin_in_dtype(twin, "float64")
    with torch.no_grad():
        for name, weight in twin.named_parameters():
            if "bias" in name.rpartition(".")[2]:
                weight.zero_()
    return twin


def measure_edges(
    problem: Problem, platform: str, jax_side: JaxSide
) -> tuple[list[str], list[str]]:
    """Faults for results that differ on edge inputs in float64, and notes on the comparisons."""
    faults, compared, notes = [], [], []
    for name, edge in edges(problem):
        try:
            reference = TorchReference(edge.twin).run(edge)
            if not_finite(reference.oracle, "torch"):
                notes.append(f"edge inputs, {name}: not compared, torch's results are not finite")
                continue
            report = measure(edge, reference, ["float64"], platform, jax_side=jax_side)
        except Exception as error:  # a module may refuse such inputs
            notes.append(f"edge inputs, {name}: not compared, {in_one_line(error)}")
            continue
        compared.append(name)
        found = [f"edge inputs, {name}: {fault}" for fault in report.faults]
        found += [
            f"edge inputs, {name}: {group} differ by {error.jax:.1e}, where {error.bound:.1e} is "
            f"allowed, worst in {error.tensor}"
            for _, group, error in report.failures
            if error.bound < UNDETERMINED
        ]
        if name == MASKED:  # a softmax over nothing, for example, has no right result
            notes += found
        elif found and picks_among_equals(edge):
            notes += [f"{fault}; torch picks one of several equals there" for fault in found]
        else:
            faults += found
    return faults, [f"edge inputs were compared: {'; '.join(compared) or 'none'}", *notes]
