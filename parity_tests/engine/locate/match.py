"""Which calls of JAX modules correspond to which calls of torch modules."""

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

import numpy as np

from parity_tests.engine.locate.record import Call, Rows
from parity_tests.engine.locate.values import difference

Pairs = dict[Call, list[Call]]
"""JAX's calls by torch call; several if, for example, JAX calls a module once per step."""


def paired(
    reference: list[Call], jax_calls: list[Call], names: Mapping[str, str], bound: float
) -> Pairs:
    """Pair the calls that `names` pairs, that hold the same weights, or that have the same name.

    Calls that are left in two paired calls are paired if they have the same last name, or if one is
    left on each side and both take the same numbers up to the bound.
    """
    matching = _Matching(reference, jax_calls, bound)
    matching.by(lambda call: names.get(call.name), lambda call: call.name)
    matching.by(_outermost, _outermost)
    matching.by_weights()
    matching.by(lambda call: call.name or None, lambda call: call.name or None)
    while matching.by_place():
        pass
    return matching.pairs


class _Matching:
    def __init__(self, reference: list[Call], jax_calls: list[Call], bound: float):
        self.reference, self.jax_calls, self.bound = reference, jax_calls, bound
        self.pairs: Pairs = {}
        self.taken: set[Call] = set()

    def add(self, reference: list[Call], jax_calls: list[Call]) -> bool:
        """Pair the calls in order if they are as many; or all of JAX's with torch's only one."""
        fitting = jax_calls
        if len(reference) < len(jax_calls):
            fitting = [c for c in jax_calls if any(_sizes_agree(r, c) == 2 for r in reference)]
        if len(reference) == len(fitting):
            self.pairs |= {r: [c] for r, c in zip(reference, fitting, strict=True)}
        elif len(reference) == 1 and jax_calls:
            self.pairs[reference[0]] = jax_calls
        else:
            return False
        self.taken.update(jax_calls)
        return True

    @property
    def left(self) -> tuple[list[Call], list[Call]]:
        return (
            [call for call in self.reference if call not in self.pairs],
            [call for call in self.jax_calls if call not in self.taken],
        )

    def by(self, key: Callable[[Call], Hashable], jax_key: Callable[[Call], Hashable]) -> None:
        """Pair the calls that have the same key."""
        reference, jax_calls = self.left
        groups = grouped(jax_calls, jax_key)
        for value, calls in grouped(reference, key).items():
            self.add(calls, groups.get(value, []))

    def by_weights(self) -> None:
        """Pair the calls that hold the same weights; of nested calls, the most similar ones."""
        reference, jax_calls = self.left
        groups = grouped(jax_calls, lambda call: call.weights or None)
        for weights, calls in grouped(reference, lambda call: call.weights or None).items():
            chains, others = (list(_chains(each)) for each in (calls, groups.get(weights, [])))
            if len(chains) != len(others):
                self.add([c[0] for c in chains], [c[0] for c in others])
                continue
            for chain, other in zip(chains, others, strict=True):
                size = min(len(chain), len(other))
                choices = itertools.product(
                    itertools.combinations(chain, size), itertools.combinations(other, size)
                )
                best = max(choices, key=lambda both: sum(map(self._likeness, *both)))
                for pair in zip(*best, strict=True):
                    self.add(*([call] for call in pair))

    def _likeness(self, call: Call, jax_call: Call) -> int:
        """How similar two calls are: sizes count more than numbers, and numbers more than names."""
        same = sum(self._is_same(call, jax_call, slot) for slot in ("inputs", "outputs"))
        is_named_so = _last_name(call) == _last_name(jax_call)
        return 6 * _sizes_agree(call, jax_call) + 2 * same + is_named_so

    def _is_same(self, call: Call, jax_call: Call, slot: str) -> bool:
        """True if both calls have the same first array in the slot."""
        first, other = (next(iter(c.slots[slot].values()), None) for c in (call, jax_call))
        if first is None or other is None:
            return False
        found = difference(other, first, self.bound)
        return found is not None and found.error <= self.bound

    def by_place(self) -> bool:
        """Pair calls that are left in two paired calls."""
        found = False
        for parent, (jax_parent, *others) in [*self.pairs.items()]:
            if others:
                continue
            reference, jax_calls = self._left_in(parent, jax_parent)
            groups = grouped(jax_calls, _last_name)
            for value, calls in grouped(reference, _last_name).items():
                if len(calls) == len(groups.get(value, [])):
                    found |= self.add(calls, groups[value])
            reference, jax_calls = self._left_in(parent, jax_parent)
            if len(reference) == len(jax_calls) == 1 and self._is_same(
                reference[0], jax_calls[0], "inputs"
            ):
                found |= self.add(reference, jax_calls)
        return found

    def _left_in(self, parent: Call, jax_parent: Call) -> tuple[list[Call], list[Call]]:
        reference, jax_calls = self.left
        return (
            _within(reference, parent, self.pairs.keys()),
            _within(jax_calls, jax_parent, self.taken),
        )


def grouped(calls: Iterable[Call], key: Callable[[Call], Hashable]) -> dict[Hashable, list[Call]]:
    """The calls by their key, without those that have none."""
    groups: dict[Hashable, list[Call]] = {}
    for call in calls:
        if (value := key(call)) is not None:
            groups.setdefault(value, []).append(call)
    return groups


def _chains(calls: list[Call]) -> Iterator[list[Call]]:
    """Groups of nested calls, the outermost first."""
    chain: list[Call] = []
    for call in calls:
        if chain and chain[0] not in call.ancestors:
            yield chain
            chain = []
        chain.append(call)
    if chain:
        yield chain


def _sizes_agree(call: Call, jax_call: Call) -> int:
    """For how many of inputs and outputs both have an array of one size, or none."""
    sizes = (
        [{a.size for a in c.slots[slot].values()} for c in (call, jax_call)]
        for slot in ("inputs", "outputs")
    )
    return sum(bool(a & b) or a == b for a, b in sizes)


def _within(calls: list[Call], parent: Call, taken) -> list[Call]:
    """The calls in the parent, except those inside another call that has a counterpart."""
    return [
        call
        for call in calls
        if parent in call.ancestors
        and not any(
            outer in taken
            for outer in itertools.takewhile(lambda outer: outer is not parent, call.ancestors)
        )
    ]


def _outermost(call: Call) -> str | None:
    """A key for the call of the whole module."""
    is_root = call.parent is not None and call.parent.parent is None
    return "whole" if is_root and not call.name else None


def _last_name(call: Call) -> str | None:
    return call.name.rpartition(".")[2].lower() or None


def stacked(calls: list[Call], slot: str) -> Rows:
    """The arrays of a module's calls, stacked along a new axis if there are several calls."""
    first, *others = (call.slots[slot] for call in calls)
    if not others:
        return first
    arrays = {
        label: [array, *(other[label] for other in others)]
        for label, array in first.items()
        if all(label in other for other in others)
    }
    return {
        label: np.stack(each) for label, each in arrays.items() if len({a.shape for a in each}) == 1
    }


def assigned(expected: Rows, actual: Rows) -> Iterator[tuple[str, np.ndarray]]:
    """JAX's array for each of torch's labels: by label and shape, then by shape, then by size."""
    left, wanted = dict(actual), dict(expected)
    for same in (
        lambda e, a: e == a and wanted[e].shape == left[a].shape,
        lambda e, a: wanted[e].shape == left[a].shape,
        lambda e, a: wanted[e].size == left[a].size,
    ):
        for label in [*wanted]:
            for candidate in [*left]:
                kinds = {(x.dtype.kind in "fcV") for x in (wanted[label], left[candidate])}
                if len(kinds) == 1 and same(label, candidate):
                    yield label, left.pop(candidate)
                    del wanted[label]
                    break
    if len(wanted) == len(left) == 1:
        yield next(iter(wanted)), next(iter(left.values()))
