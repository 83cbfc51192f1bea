"""Pairs the calls of JAX modules with the calls of torch modules."""

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping

from parity_tests.engine.locate.steps import calls_of_steps
from parity_tests.engine.locate.values import difference
from parity_tests.engine.traces.trace import Call

Pairs = dict[Call, list[Call]]
"""JAX's calls for each torch call: several if, for example, JAX calls a module at each step. If
torch does so and JAX calls its module once, each torch call has its step of that call."""


def pair_calls(
    reference: list[Call], jax_calls: list[Call], names: Mapping[str, str], bound: float
) -> Pairs:
    """Pairs the calls that `names` pairs, that hold the same weights, or that have the same name.

    The remaining calls inside two paired calls are paired if the last parts of their names are the
    same, or if only one remains on each side and both take the same numbers up to the bound.
    """
    pairing = _Pairing(reference, jax_calls, bound)
    pairing.pair_by(lambda call: names.get(call.name), lambda call: call.name)
    pairing.pair_by(lambda call: _is_outermost(call) or None)
    pairing.pair_by_weights()
    pairing.pair_by(lambda call: call.name or None)
    count = -1
    while len(pairing.pairs) > count:
        count = len(pairing.pairs)
        pairing.pair_by(
            pairing.enclosing_call_and_name, fits=lambda calls, others: len(calls) == len(others)
        )
        pairing.pair_by(pairing.enclosing_call, fits=pairing.take_same_input)
    return pairing.pairs


class _Pairing:
    def __init__(self, reference: list[Call], jax_calls: list[Call], bound: float):
        self.reference, self.jax_calls, self.bound = reference, jax_calls, bound
        self.pairs: Pairs = {}
        self.torch_calls: dict[Call, Call] = {}
        """The torch call of each paired JAX call."""

    def pair(self, reference: list[Call], jax_calls: list[Call]) -> None:
        """Pairs the calls in order if both sides have equally many, or one with all of the others.

        If JAX has more calls, those whose sizes do not fit are ignored if that makes the numbers
        equal.
        """
        same_size = jax_calls
        if len(reference) < len(jax_calls):
            same_size = [c for c in jax_calls if any(_agreeing_sizes(r, c) == 2 for r in reference)]
        if len(reference) == len(same_size):
            self.pairs |= {r: [c] for r, c in zip(reference, same_size, strict=True)}
        elif len(reference) == 1 and jax_calls:
            self.pairs[reference[0]] = jax_calls
        elif len(jax_calls) == 1 and (steps := calls_of_steps(jax_calls[0], reference)):
            self.pairs |= {r: [step] for r, step in zip(reference, steps, strict=True)}
        else:
            return
        self.torch_calls |= dict.fromkeys(jax_calls, reference[0])
        self.torch_calls |= {c: r for r in reference for c in self.pairs[r]}

    def pair_by(
        self,
        key: Callable[[Call], Hashable],
        jax_key: Callable[[Call], Hashable] | None = None,
        fits: Callable[[list[Call], list[Call]], bool] = lambda calls, others: True,
    ) -> None:
        """Pairs the calls that have the same key; a call whose key is None is left out."""
        others = self._groups(self.jax_calls, jax_key or key)
        for value, group in self._groups(self.reference, key).items():
            if fits(group, others.get(value, [])):
                self.pair(group, others.get(value, []))

    def _groups(
        self, calls: list[Call], key: Callable[[Call], Hashable]
    ) -> dict[Hashable, list[Call]]:
        """The calls of a side that are not paired yet, by their key."""
        groups: dict[Hashable, list[Call]] = {}
        for call in calls:
            value = key(call)
            if value is not None and call not in self.pairs and call not in self.torch_calls:
                groups.setdefault(value, []).append(call)
        return groups

    def pair_by_weights(self) -> None:
        """Pairs the calls that hold the same weights.

        A module and its only submodule hold the same weights, too. Of such nested calls, those that
        are most alike are paired.
        """
        found, jax_found = (
            self._groups(calls, lambda call: call.weights or None)
            for calls in (self.reference, self.jax_calls)
        )
        for weights, calls in found.items():
            nests, others = _nested_groups(calls), _nested_groups(jax_found.get(weights, []))
            if len(nests) != len(others):
                self.pair([nest[0] for nest in nests], [nest[0] for nest in others])
                continue
            for nest, other in zip(nests, others, strict=True):
                size = min(len(nest), len(other))
                choices = itertools.product(
                    itertools.combinations(nest, size), itertools.combinations(other, size)
                )
                best = max(choices, key=lambda both: self._likeness(*both))
                for call, jax_call in zip(*best, strict=True):
                    self.pair([call], [jax_call])

    def _likeness(self, calls: Iterable[Call], others: Iterable[Call]) -> tuple[int, int, int]:
        """The number of sizes, arrays and names that the calls share, the most important first."""
        pairs = [*zip(calls, others, strict=True)]
        slots = "inputs", "outputs"
        return (
            sum(_agreeing_sizes(*pair) for pair in pairs),
            sum(self._is_same(*pair, slot) for pair in pairs for slot in slots),
            sum(_last_name(call) == _last_name(other) for call, other in pairs),
        )

    def _is_same(self, call: Call, jax_call: Call, slot: str) -> bool:
        """True if both calls have the same first array in the slot."""
        first, other = (next(iter(c.slots[slot].values()), None) for c in (call, jax_call))
        if first is None or other is None:
            return False
        found = difference(other, first, self.bound)
        return found is not None and found.error <= self.bound

    def enclosing_call(self, call: Call) -> Call | None:
        """The innermost paired call around a call of either side, as a torch call.

        None if that call is paired with several JAX calls.
        """
        outer = next((o for o in call.ancestors if o in self.pairs or o in self.torch_calls), call)
        outer = self.torch_calls.get(outer, outer)
        return outer if len(self.pairs.get(outer, ())) == 1 else None

    def enclosing_call_and_name(self, call: Call) -> Hashable:
        """The place of a call and the last part of its name."""
        enclosing_call, name = self.enclosing_call(call), _last_name(call)
        return (enclosing_call, name) if enclosing_call is not None and name else None

    def take_same_input(self, calls: list[Call], others: list[Call]) -> bool:
        """True if there is one call on each side and both take the same first input."""
        return len(calls) == len(others) == 1 and self._is_same(calls[0], others[0], "inputs")


def _nested_groups(calls: list[Call]) -> list[list[Call]]:
    """Groups of nested calls: each outermost call, followed by the calls inside it."""
    outer = [call for call in calls if not {*calls} & {*call.ancestors}]
    return [[call for call in calls if each in (call, *call.ancestors)] for each in outer]


def _agreeing_sizes(call: Call, jax_call: Call) -> int:
    """In how many slots, inputs and outputs, both calls have an array of the same size, or none."""
    sizes = (
        [{a.size for a in c.slots[slot].values()} for c in (call, jax_call)]
        for slot in ("inputs", "outputs")
    )
    return sum(bool(a & b) or a == b for a, b in sizes)


def _is_outermost(call: Call) -> bool:
    """True for the call of the whole module."""
    return call.parent is not None and call.parent.parent is None and not call.name


def _last_name(call: Call) -> str:
    return call.name.rpartition(".")[2].lower()
