"""The calls of both sides, beside each other."""

import dataclasses

import numpy as np

from parity_tests.engine.bounds.tolerance import rms
from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.locate.agree import Difference, difference
from parity_tests.engine.locate.arrays import assigned, of_both
from parity_tests.engine.locate.evidence import (
    AGREES,
    BACKWARD,
    DEPARTS,
    FORWARD,
    UNKNOWN,
    Direction,
    Evidence,
    is_telling,
    numbers,
)
from parity_tests.engine.locate.frameworks import recording
from parity_tests.engine.locate.match import Pairs
from parity_tests.engine.locate.record import Call, Trace
from parity_tests.engine.locate.run import Run
from parity_tests.engine.locate.search import Search, Wanted, watched
from parity_tests.engine.locate.theirs import Theirs
from parity_tests.engine.problem import Problem


@dataclasses.dataclass
class Comparison:
    """The calls of both sides, beside each other."""

    problem: Problem
    theirs: Theirs
    ours: Run
    pairs: Pairs
    least: float
    differences: dict[tuple[Call, str], dict[str, Difference]] = dataclasses.field(
        default_factory=dict
    )

    @property
    def oracle(self) -> Run:
        """The reference's in float64."""
        return self.theirs.run

    def evidence(self, direction: Direction) -> Evidence:
        """What agrees and what departs in this direction."""
        evidence = Evidence(self.oracle.trace)
        whole = self.oracle.whole
        evidence.of[whole, "inputs"] = dict.fromkeys(whole.slots["inputs"], AGREES)
        shared: dict[tuple[Call, ...], list[Call]] = {}
        for call, calls in self.pairs.items():
            shared.setdefault(tuple(calls), []).append(call)
        for ours, theirs in shared.items():
            evidence.compared.update(call for call in theirs if call is not self.oracle.whole)
            for slot in (direction.taken, direction.given):
                self._compare(evidence, theirs[0], slot, ours)
            if direction is BACKWARD and ours[0].slots[FORWARD.taken]:  # a tap takes nothing
                self._note_stopped(evidence, theirs, ours[0])
        if direction is BACKWARD:
            self._compare_weight_gradients(evidence)
        evidence.spread(self.oracle.trace)
        return evidence

    def _compare(
        self, evidence: Evidence, call: Call, slot: str, our_calls: tuple[Call, ...]
    ) -> None:
        expected, ours = of_both(call, our_calls, slot)
        largest = max((rms(a) for a in expected.values()), default=0.0) if "grad" in slot else 0.0
        found = self.differences.setdefault((call, slot), {})
        states = evidence.of.setdefault((call, slot), {})
        for label, actual in assigned(expected, ours):
            d = difference(actual, expected[label], self.least, largest)
            if d is None or (slot == "inputs" and actual.size > expected[label].size):
                continue  # padded, say, before JAX's module, where torch's pads within
            bound = self.theirs.bound(call, slot, label, d.error, self.least)
            if bound > d.error or d.layout:
                d = difference(actual, expected[label], bound, largest) or d
            found[label] = d
            states[label] = AGREES if d.error <= bound else DEPARTS

    def _note_stopped(self, evidence: Evidence, calls: list[Call], ours: Call) -> None:
        """JAX stops a gradient where torch does not: after a module, or in it or before it."""
        stopped = [c for c in calls if c.slots[BACKWARD.given] and not ours.slots[BACKWARD.given]]
        if ours.slots[BACKWARD.taken] or "weight gradients" not in self.ours.results:
            evidence.cut.update(stopped)
            return
        for call in stopped:
            labels = call.slots[BACKWARD.taken]
            evidence.of[call, BACKWARD.taken] = dict.fromkeys(labels, DEPARTS)

    def _compare_weight_gradients(self, evidence: Evidence) -> None:
        """A call gives the gradients of its weights beside those of its inputs.

        In float64, where rounding explains nothing, also those around: none of them is right.
        """
        actual = self.ours.results.get("weight gradients", {})
        expected = self.oracle.results.get("weight gradients", {})
        largest = max(map(rms, expected.values()), default=0.0)
        slot = BACKWARD.given
        for call in self.oracle.trace.calls:
            for key, wanted in call.slots["weight gradients"].items():
                if key not in actual:
                    continue
                d = difference(actual[key], wanted, self.least, largest)
                error = np.inf if d is None else d.error
                bound = self.theirs.bound(call, "weight gradients", key, error, self.least)
                self.differences.setdefault((call, slot), {})[key] = Difference(error)
                state = AGREES if error <= bound else DEPARTS
                is_clear = state == DEPARTS and self.theirs.dtype == "float64"
                for giver in (call, *call.ancestors) if is_clear else (call,):
                    giver.slots[slot][f"weight {key}"] = wanted
                    evidence.of.setdefault((giver, slot), {})[f"weight {key}"] = state

    def search(self, direction: Direction, evidence: Evidence) -> None:
        """Look for what is unknown among all that JAX computes.

        And for outputs that depart though JAX may compute them, and then more: an activation that
        belongs to a JAX module, but not to torch's, or what follows the last submodule.
        """
        places: dict[bytes, list[tuple[Call, str, str]]] = {}
        parents = {call.parent for call in self.oracle.trace.calls}
        for (call, slot), states in evidence.of.items():
            sought = {UNKNOWN}
            if slot == direction.given and self._may_do_more(call, direction, evidence, parents):
                sought.add(DEPARTS)
            for label in states if slot in (direction.taken, direction.given) else ():
                array, place = call.slots[slot][label], (call, slot, label)
                if states[label] in sought and is_telling(array):
                    places.setdefault(numbers(*place), []).append(place)
        wanted = []
        for (call, slot, label), *others in places.values():
            givers = [c for c, s, _ in others if s == direction.given]
            givers += [call] if slot == direction.given else []
            bound = max(self.least, self.theirs.constant_error(call, slot, label))
            is_total = direction is BACKWARD and len(givers) == 0
            givers = [giver for giver in givers if giver not in parents]
            wanted.append(Wanted(call.slots[slot][label], givers, bound, is_total))
        if not wanted:
            return
        search = Search(wanted)
        with recording(Trace(), self.problem) as side:
            watching = JaxSide(side, transform=lambda function: watched(function, search.see))
            results = self.oracle.results
            watching.run(
                side, self.theirs.dtype, results.forward if direction is FORWARD else results
            )
        for each, found in zip(places.values(), wanted, strict=True):
            if found.error <= found.bound:
                for call, slot, label in each:
                    evidence.of[call, slot][label] = AGREES
                    if slot == direction.given:
                        self.pairs.pop(call, None)
            elif found.similar:
                evidence.similar.update(found.givers)
        evidence.spread(self.oracle.trace)

    def _may_do_more(
        self, call: Call, direction: Direction, evidence: Evidence, parents: set[Call | None]
    ) -> bool:
        """Is it one that was not compared by itself, or a layer that gets what is right?

        Backward, nothing is computed in one piece: of a gradient that departs, JAX may well compute
        a part that is right.
        """
        if direction is BACKWARD or call.kind == "run" or not call.name:
            return False
        is_layer = bool(call.weights) and call not in parents
        is_right = evidence.state(call, direction.taken) == AGREES
        return call not in evidence.compared or (is_layer and is_right)
