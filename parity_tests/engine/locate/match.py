"""Which calls of JAX modules correspond to which calls of torch modules."""

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

import numpy as np

from parity_tests.engine.locate.record import Call, Rows
from parity_tests.engine.locate.values import difference

Pairs = dict[Call, list[Call]]
"""By torch call: JAX's, which are several where JAX calls a module once a step, say."""


def paired(
    reference: list[Call], jax_calls: list[Call], names: Mapping[str, str], bound: float
) -> Pairs:
    """Calls correspond that are named so, hold the same weights, or have the same name.

    Of what is left in two calls that correspond, those do that have the same last name, or the two
    that are the only ones, if they take the same numbers up to the bound.
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
        """The k-th with the k-th; of more than torch's, those of its sizes, or all with its one."""
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
        """Those that have one key."""
        reference, jax_calls = self.left
        groups = grouped(jax_calls, jax_key)
        for value, calls in grouped(reference, key).items():
            self.add(calls, groups.get(value, []))

    def by_weights(self) -> None:
        """Those that hold the same weights; of calls inside each other, the most alike."""
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
        """In how much they are alike, the sizes before the numbers before the names."""
        same = sum(self._is_same(call, jax_call, slot) for slot in ("inputs", "outputs"))
        is_named_so = _last_name(call) == _last_name(jax_call)
        return 6 * _sizes_agree(call, jax_call) + 2 * same + is_named_so

    def _is_same(self, call: Call, jax_call: Call, slot: str) -> bool:
        """Have both the same first array there?"""
        first, other = (next(iter(c.slots[slot].values()), None) for c in (call, jax_call))
        if first is None or other is None:
            return False
        found = difference(other, first, self.bound)
        return found is not None and found.error <= self.bound

    def by_place(self) -> bool:
        """What is left in two calls that correspond."""
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
    """Calls inside each other, the outermost first."""
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
    """Those called in the parent, not in another that has a counterpart."""
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
    """The whole module, if it is called."""
    is_root = call.parent is not None and call.parent.parent is None
    return "whole" if is_root and not call.name else None


def _last_name(call: Call) -> str | None:
    return call.name.rpartition(".")[2].lower() or None


def stacked(calls: list[Call], slot: str) -> Rows:
    """The arrays of a module's calls, the calls as an axis if they are more than one."""
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
    """Which of JAX's arrays is which of torch's: of one label and shape, then of one shape."""
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
