"""Which calls of JAX modules correspond to which calls of torch modules."""

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

from parity_tests.engine.locate.agree import difference
from parity_tests.engine.locate.record import Call

SAME = 1e-3
"""The error up to which arrays are the same numbers, in whatever dtype one side has them."""
Pairs = dict[Call, list[Call]]
"""By torch call: JAX's, which are several where JAX calls a module once a step, say."""


def paired(theirs: list[Call], ours: list[Call], names: Mapping[str, str]) -> Pairs:
    """Calls correspond that are named so, hold the same weights, or have the same name.

    Then what is left in two calls that correspond: the same name there, weights of the same shapes,
    or the same class, or the only one that is left, if it returns the same.
    """
    pairs: Pairs = {}
    matching = _Matching(theirs, ours, pairs)
    matching.by(lambda call: names.get(call.name), lambda call: call.name)
    matching.by(_outermost, _outermost)
    matching.by_weights()
    matching.by(lambda call: call.name or None, lambda call: call.name or None)
    while matching.by_place():
        pass
    return pairs


class _Matching:
    def __init__(self, theirs: list[Call], ours: list[Call], pairs: Pairs):
        self.theirs, self.ours, self.pairs = theirs, ours, pairs
        self.taken: set[Call] = set()

    def add(self, theirs: list[Call], ours: list[Call]) -> bool:
        """The k-th with the k-th; of more than torch's, those of its sizes, or all with its one."""
        fitting = ours
        if len(theirs) < len(ours):
            fitting = [o for o in ours if any(_sizes_agree(t, o) == 2 for t in theirs)]
        if len(theirs) == len(fitting):
            self.pairs |= {t: [o] for t, o in zip(theirs, fitting, strict=True)}
        elif len(theirs) == 1 and ours:
            self.pairs[theirs[0]] = ours
        else:
            return False
        self.taken.update(ours)
        return True

    @property
    def left(self) -> tuple[list[Call], list[Call]]:
        return (
            [call for call in self.theirs if call not in self.pairs],
            [call for call in self.ours if call not in self.taken],
        )

    def by(self, key: Callable[[Call], Hashable], our_key: Callable[[Call], Hashable]) -> None:
        """Those that have one key."""
        theirs, ours = self.left
        groups = grouped(ours, our_key)
        for value, calls in grouped(theirs, key).items():
            self.add(calls, groups.get(value, []))

    def by_weights(self) -> None:
        """Those that hold the same weights; a call in one with the same is its own code's part."""
        theirs, ours = self.left
        groups = grouped(ours, lambda call: call.weights or None)
        for weights, calls in grouped(theirs, lambda call: call.weights or None).items():
            chains, our_chains = (list(_chains(each)) for each in (calls, groups.get(weights, [])))
            if len(chains) != len(our_chains):
                self.add([c[0] for c in chains], [c[0] for c in our_chains])
                continue
            for chain, our_chain in zip(chains, our_chains, strict=True):
                self._add_chain(chain, our_chain)

    def _add_chain(self, chain: list[Call], our_chain: list[Call]) -> None:
        """Those that take and return arrays of the same sizes, the outermost if in doubt."""
        size = min(len(chain), len(our_chain))
        if len(chain) != len(our_chain):
            chain, our_chain = (
                [c for c in each if len(each) == size or not _is_mere_wrapper(c, each)]
                for each in (chain, our_chain)
            )
            size = min(size, len(chain), len(our_chain))
        choices = itertools.product(
            itertools.combinations(chain, size), itertools.combinations(our_chain, size)
        )
        theirs, ours = max(choices, key=lambda both: sum(map(_likeness, *both)))
        for pair in zip(theirs, ours, strict=True):
            self.add(*([call] for call in pair))

    def by_place(self) -> bool:
        """What is left in two calls that correspond."""
        found = False
        for parent, (our_parent, *others) in [*self.pairs.items()]:
            if others:
                continue
            for key in (_last_name, _shapes, _kind):
                theirs, ours = self.left
                groups = grouped(_within(ours, our_parent, self.taken), key)
                for value, calls in grouped(
                    _within(theirs, parent, self.pairs.keys()), key
                ).items():
                    if len(calls) == len(groups.get(value, [])):
                        found |= self.add(calls, groups[value])
            theirs, ours = self.left
            theirs = _within(theirs, parent, self.pairs.keys())
            ours = _within(ours, our_parent, self.taken)
            if len(theirs) == len(ours) == 1 and _gives_the_same(theirs[0], ours[0]):
                found |= self.add(theirs, ours)
        return found


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


def _likeness(call: Call, our_call: Call) -> int:
    """In how much they are alike, the sizes before the numbers before the names."""
    is_named_so = _last_name(call) == _last_name(our_call)
    return 4 * _sizes_agree(call, our_call) + 2 * _gives_the_same(call, our_call) + is_named_so


def _gives_the_same(call: Call, our_call: Call) -> bool:
    """Do both return the same first array?"""
    first, ours = (next(iter(c.slots["outputs"].values()), None) for c in (call, our_call))
    if first is None or ours is None:
        return False
    found = difference(ours, first, SAME)
    return found is not None and found.error <= SAME


def _sizes_agree(call: Call, our_call: Call) -> int:
    """For how many of inputs and outputs both have an array of one size, or none."""
    sizes = (
        [{a.size for a in c.slots[slot].values()} for c in (call, our_call)]
        for slot in ("inputs", "outputs")
    )
    return sum(bool(a & b) or a == b for a, b in sizes)


def _is_mere_wrapper(call: Call, chain: list[Call]) -> bool:
    """Does it only pass on what one in it takes and returns?"""
    inner = [other for other in chain if call in other.ancestors]
    return any(
        all(
            [a.tobytes() for a in call.slots[slot].values()]
            == [a.tobytes() for a in other.slots[slot].values()]
            for slot in ("inputs", "outputs")
        )
        for other in inner
    )


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


def _shapes(call: Call) -> Hashable:
    return call.shapes or None


def _kind(call: Call) -> str | None:
    return None if call.shapes else call.kind.lower()
