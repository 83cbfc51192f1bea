"""The calls of both sides, beside each other."""

import dataclasses
import functools
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from parity_tests.engine.constants import random_moves
from parity_tests.engine.jax_side import JaxSide
from parity_tests.engine.locate.agree import Difference, difference
from parity_tests.engine.locate.blame import (
    AGREES,
    BACKWARD,
    DEPARTS,
    FORWARD,
    UNKNOWN,
    Blame,
    Direction,
    Evidence,
    is_telling,
    numbers,
    timeline,
)
from parity_tests.engine.locate.frameworks import recording
from parity_tests.engine.locate.location import Location, Visit
from parity_tests.engine.locate.match import Pairs
from parity_tests.engine.locate.record import Call, Rows, Trace
from parity_tests.engine.locate.run import Run, of_torch
from parity_tests.engine.locate.search import Search, Wanted, watched
from parity_tests.engine.problem import Problem
from parity_tests.engine.tolerance import ROUNDED_RUNS, K, rms
from parity_tests.engine.torch_reference import rounded_constants, with_moved_constants
from parity_tests.engine.torch_side import run_oracle, run_torch, run_torch_rounded


@dataclasses.dataclass
class Comparison:
    """The calls of both sides, beside each other."""

    problem: Problem
    dtype: str
    oracle: Run
    ours: Run
    pairs: Pairs
    least: float
    differences: dict[tuple[Call, str], dict[str, Difference]] = dataclasses.field(
        default_factory=dict
    )

    def __post_init__(self):
        self._runs: list[Run] | None = None

    def bound(self, call: Call, slot: str, label: str, error: float) -> float:
        """The largest error that rounding explains; torch is run as often as it takes to tell."""
        least = self.least
        if error <= least or not np.isfinite(error):
            return least
        least = max(least, self.by_constants(call, slot, label))
        if error <= least:
            return least
        index, expected = self.oracle.trace.calls.index(call), call.slots[slot][label]
        for run, factor in self.torch_runs(error > 1e3 * least and self.dtype == "float64"):
            least = max(least, factor * _off(run, index, slot, label, expected))
            if error <= least:
                break
        return least

    def by_constants(self, call: Call, slot: str, label: str) -> float:
        """How far an array is off where torch's constants are off by their rounding to float32."""
        index, expected = self.oracle.trace.calls.index(call), call.slots[slot][label]
        runs = self.moved if self.dtype == "float64" else ()
        return max((_off(run, index, slot, label, expected) for run in runs), default=0.0)

    @functools.cached_property
    def moved(self) -> list[Run]:
        """Torch in float64 with other constants, if some are rounded to float32."""
        names = [*(constants := rounded_constants(self.problem))]
        problems = (
            with_moved_constants(self.problem, dict(zip(names, moves, strict=True)))
            for moves in random_moves([*constants.values()], self.problem.seed)
        )
        return [of_torch(problem, lambda problem: run_oracle(problem)[0]) for problem in problems]

    def torch_runs(self, plain: bool) -> Iterator[tuple[Run, float]]:
        """Torch in the dtype, and with random rounding unless the error is plain to see."""
        if self._runs is None:
            self._runs = [of_torch(self.problem, lambda p: run_torch(p, self.dtype))]
        if self.dtype != "float64":  # else with casts, which are left out of the comparison
            yield self._runs[0], K
        if plain:
            return
        if len(self._runs) == 1:
            _, mode = run_oracle(self.problem)
            self._runs += [
                of_torch(
                    self.problem,
                    lambda p, seed=seed: run_torch_rounded(p, self.dtype, seed, mode.decisions),
                )
                for seed in range(ROUNDED_RUNS)
            ]
        for run in self._runs[1:]:
            yield run, 1.0

    def evidence(self, direction: Direction) -> Evidence:
        """What agrees and what departs in this direction."""
        evidence = Evidence(self.oracle.trace)
        whole = self.oracle.whole
        evidence.of[whole, "inputs"] = dict.fromkeys(whole.slots["inputs"], AGREES)
        stacked: dict[tuple[Call, ...], list[Call]] = {}
        for call, calls in self.pairs.items():
            stacked.setdefault(tuple(calls), []).append(call)
        for ours, theirs in stacked.items():
            evidence.compared.update(call for call in theirs if call is not self.oracle.whole)
            if direction is BACKWARD and ours[0].slots[FORWARD.taken]:  # a tap takes nothing
                is_cut = not ours[0].slots[direction.given]
                evidence.cut.update(c for c in theirs if is_cut and c.slots[direction.given])
            for slot in (direction.taken, direction.given):
                self._compare(evidence, theirs[0], slot, _stacked(ours, slot))
        if direction is BACKWARD:
            self._compare_weight_gradients(evidence)
        evidence.spread(self.oracle.trace)
        return evidence

    def _compare(self, evidence: Evidence, call: Call, slot: str, ours: Rows) -> None:
        expected = call.slots[slot]
        largest = max((rms(a) for a in expected.values()), default=0.0) if "grad" in slot else 0.0
        found = self.differences.setdefault((call, slot), {})
        states = evidence.of.setdefault((call, slot), {})
        for label, actual in _assigned(expected, ours):
            d = difference(actual, expected[label], self.least, largest)
            if d is None or (slot == "inputs" and actual.size > expected[label].size):
                continue  # padded, say, before JAX's module, where torch's pads within
            bound = self.bound(call, slot, label, d.error)
            if bound > d.error or d.layout:
                d = difference(actual, expected[label], bound, largest) or d
            found[label] = d
            states[label] = AGREES if d.error <= bound else DEPARTS

    def _compare_weight_gradients(self, evidence: Evidence) -> None:
        """A weight's gradient is given by the last call of the innermost module that has it."""
        expected = self.oracle.results.get("weight gradients", {})
        actual = self.ours.results.get("weight gradients", {})
        largest = max(map(rms, expected.values()), default=0.0)
        for key, wanted in expected.items():
            if key not in actual:
                continue
            owner = key.rpartition(".")[0]
            calls = [c for c in self.oracle.trace.calls if c.kind != "run" and c.name == owner]
            if not calls:
                continue
            call, slot = calls[0], BACKWARD.given
            call.slots[slot][f"weight {key}"] = wanted
            d = difference(actual[key], wanted, self.least, largest)
            error = np.inf if d is None else d.error
            self.differences.setdefault((call, slot), {})[key] = Difference(error)
            bound = self.least
            states = evidence.of.setdefault((call, slot), {})
            states[f"weight {key}"] = AGREES if error <= bound else DEPARTS

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
            bound = max(self.least, self.by_constants(call, slot, label))
            is_total = direction is BACKWARD and len(givers) == 0
            givers = [giver for giver in givers if giver not in parents]
            wanted.append(Wanted(call.slots[slot][label], givers, bound, is_total))
        if not wanted:
            return
        search = Search(wanted)
        with recording(Trace(), self.problem) as side:
            watching = JaxSide(side, transform=lambda function: watched(function, search.see))
            watching.run(side, self.dtype, self.oracle.results)
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

    def location(self, direction: Direction, evidence: Evidence, blame: Blame) -> Location:
        """What the report says of a departure."""
        visits = []
        for call, slot in timeline(self.oracle.trace, direction):
            departs = slot == direction.given and evidence.state(call, slot) == DEPARTS
            departs |= evidence.state(call, direction.taken) == DEPARTS
            is_hidden = any(
                evidence.state(outer, direction.given) == AGREES for outer in call.ancestors
            )
            if slot == direction.given and call in self.pairs and not is_hidden and call.parent:
                visits.append(self._visit(call, direction, departs))
            if call in (blame.before, blame.call) and slot == direction.given:
                break
        where = "the module itself" if blame.call and not blame.call.name else ""
        if blame.call is None:
            verdict = f"not known, {direction}, in {blame.within.name or 'the module'}"
        else:
            verdict = f"{where or blame.call.name}, {direction}"
        between = [
            f"{word} {call.name or 'the module'}"
            for word, call in (("after", blame.after), ("before", blame.before))
            if call is not None and call.kind != "run" and call not in blame.within.ancestors
        ]
        verdict += "".join(f", {each}" for each in between)
        culprit = None if blame.call is None else blame.call.name
        return Location(self.dtype, tuple(visits), culprit, verdict, self._remarks(blame.unknown))

    def _visit(self, call: Call, direction: Direction, departs: bool) -> Visit:
        errors, layouts = [], []
        for slot in (direction.taken, direction.given):
            found = self.differences.get((call, slot), {}).values()
            errors.append(max((d.error for d in found), default=None))
            layouts += [d.layout for d in found if d.layout]
        jax_name = self.pairs[call][0].name
        return Visit(call.name, jax_name, errors[0], errors[1], departs, ", ".join({*layouts}))

    def _remarks(self, unknown: tuple[Call, ...]) -> tuple[str, ...]:
        names = [*dict.fromkeys(call.name for call in unknown if call.name)]
        if not names:
            return ()
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return (f"(not compared: {shown}, which nothing in JAX corresponds to)",)

    def nothing_departs(self, is_forward: bool) -> Location:
        """What the report says if all numbers agree that could be compared, or those forward."""
        compared = [
            call
            for call, slot in timeline(self.oracle.trace, FORWARD)
            if slot == FORWARD.given and call in self.pairs and call is not self.oracle.whole
        ]
        theirs = of_torch(self.problem, lambda p: run_torch(p, self.dtype))
        visits = []
        for call in compared:
            index = self.oracle.trace.calls.index(call)
            taken, given = (
                [
                    {dtype for (at, _), dtype in each.dtypes.items() if at == slot}
                    for each in (self.pairs[call][0], theirs.trace.calls[index])
                ]
                for slot in (FORWARD.taken, FORWARD.given)
            )
            departs = taken[0] <= taken[1] and not given[0] <= given[1]
            remark = f"{', '.join(given[0])}, not {', '.join(given[1])}" if departs else ""
            visits.append(dataclasses.replace(self._visit(call, FORWARD, departs), remark=remark))
            if departs:
                verdict = f"{call.name or 'the module itself'}, by its dtype"
                return Location(self.dtype, tuple(visits), call.name, verdict)
        if compared or len(self.oracle.trace.calls) <= 2:
            verdict = "none, all that was compared agrees"
            if is_forward:
                verdict = "not known, forward, no submodule is further off than rounding explains"
        else:
            verdict = "not known, no submodule could be compared with anything"
        return Location(self.dtype, tuple(visits), None, verdict)


def _off(run: Run, index: int, slot: str, label: str, expected: np.ndarray) -> float:
    """How far an array of a call is off in another run; nothing if it is not there."""
    calls = run.trace.calls
    value = calls[index].slots[slot].get(label) if index < len(calls) else None
    if value is None or value.shape != expected.shape:
        return 0.0
    return rms(value.astype(float) - expected) / (rms(expected) or 1.0)


def _stacked(calls: tuple[Call, ...], slot: str) -> Rows:
    """The arrays of several calls, the calls as an axis if they are more than one."""
    first, *rest = calls
    if not rest:
        return first.slots[slot]
    return {
        label: np.stack([call.slots[slot][label] for call in calls])
        for label, array in first.slots[slot].items()
        if all(
            label in call.slots[slot] and call.slots[slot][label].shape == array.shape
            for call in rest
        )
    }


def _assigned(expected: Rows, actual: Rows) -> Iterator[tuple[str, np.ndarray]]:
    """Which of JAX's arrays is which of torch's: of one label, shape and place, or what is left."""
    left, wanted = dict(actual), dict(expected)
    for same in (
        lambda e, a: e == a and _fits(wanted[e], left[a], exact=True),
        lambda e, a: _fits(wanted[e], left[a], exact=True),
        lambda e, a: _fits(wanted[e], left[a], exact=False),
    ):
        for label in [*wanted]:
            for candidate in [*left]:
                if same(label, candidate):
                    yield label, left.pop(candidate)
                    del wanted[label]
                    break
    if len(wanted) == len(left) == 1:
        yield next(iter(wanted)), next(iter(left.values()))


def _fits(expected: np.ndarray, actual: np.ndarray, *, exact: bool) -> bool:
    kinds = [jnp.issubdtype(a.dtype, jnp.floating) for a in (expected, actual)]
    if kinds[0] != kinds[1]:
        return False
    return expected.shape == actual.shape if exact else expected.size == actual.size
