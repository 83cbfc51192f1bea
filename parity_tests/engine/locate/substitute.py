"""The substitution test: does JAX apply a layer to another input than torch does?

If a layer and the code around it are both suspects, the torch layer is run on the arrays that JAX
computes. If JAX also computes the result, then JAX's layer is right, and the code around the layer
gave it another input.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from parity_tests.engine.locate.evidence import Evidence, telling_arrays
from parity_tests.engine.locate.search import Search, WantedArray, WatchingEvaluator
from parity_tests.engine.locate.values import identity, layouts
from parity_tests.engine.problem import Problem
from parity_tests.engine.traces.frameworks import trace_jax
from parity_tests.engine.traces.trace import FORWARD, Call


class Substitution:
    """Runs torch's calls on JAX's arrays, in the direction of the evidence."""

    def __init__(self, problem: Problem, evidence: Evidence):
        self.problem, self.evidence, self.direction = problem, evidence, evidence.direction
        self.calls, self.reference = evidence.trace.calls, evidence.reference
        self.is_possible = self.reference.run_again is not None

    def takes_other_input(self, calls: Sequence[Call]) -> dict[Call, bool]:
        """For each call, whether JAX computes it from another array than torch does.

        Calls for which the test would prove nothing are left out. In the forward pass, these are
        calls without weights and calls of a module that is called several times, because JAX may
        compute them elsewhere.
        """
        tested = {call: self._incoming(call) for call in calls if self._is_conclusive(call)}
        if not tested or (run_again := self.reference.run_again) is None:
            return {}

        # Keep all of JAX's arrays that a call could take.
        sizes = {array.size for incoming in tested.values() for _, array in incoming}
        jax_arrays: dict[int, dict[int, np.ndarray]] = {size: {} for size in sizes}

        def keep(value: np.ndarray, *, is_summand: bool = False) -> None:
            if value.size in jax_arrays and np.isfinite(value).all():
                jax_arrays[value.size][hash(value.tobytes())] = np.array(value, float)

        self._run_jax(keep)

        # Run each call on each of these arrays. If JAX has a result that no call of torch's has, it
        # applies the call to another array.
        results: list[tuple[Call, str, WantedArray]] = []
        for call, incoming in tested.items():
            for labels, array in incoming:
                others = [
                    layout
                    for other in jax_arrays[array.size].values()
                    for _, layout in layouts(other, array.shape)
                ]
                outgoing = run_again(call.index, self.direction, labels, others)
                results += [
                    (call, label, WantedArray(result))
                    for other, arrays in zip(others, outgoing, strict=True)
                    for label, result in arrays.items()
                    if label in telling_arrays(call, self.direction.outgoing)
                    and not (result.size == other.size and (result.ravel() == other.ravel()).all())
                ]

        # Leave out results that a call of torch's has, and look for the others among JAX's arrays.
        among_torch_arrays = Search([WantedArray(each.array) for *_, each in results])
        for call in self.calls:
            for slot in (self.direction.incoming, self.direction.outgoing):
                for array in telling_arrays(call, slot).values():
                    among_torch_arrays.see(array)
        new = [
            (call, label, result)
            for (call, label, result), in_torch in zip(
                results, among_torch_arrays.wanted, strict=True
            )
            if not self._is_same(call, label, in_torch.error)
        ]
        self._run_jax(Search([result for *_, result in new]).see)
        found = {c for c, label, result in new if self._is_same(c, label, result.error)}
        return {call: call in found for call in tested}

    def _is_same(self, call: Call, label: str, error: float) -> bool:
        """True if rounding explains the error of a result."""
        return self.evidence.is_within(call, self.direction.outgoing, label, error)

    def _is_conclusive(self, call: Call) -> bool:
        if not telling_arrays(call, self.direction.outgoing):
            return False
        is_called_once = [each.name for each in self.calls].count(call.name) == 1
        return self.direction is not FORWARD or (bool(call.weights) and is_called_once)

    def _incoming(self, call: Call) -> list[tuple[list[str], np.ndarray]]:
        """The arrays that a call takes, each once, with its labels."""
        incoming = telling_arrays(call, self.direction.incoming)
        labels: dict[bytes, list[str]] = {}
        for label in incoming:
            labels.setdefault(identity(call, self.direction.incoming, label), []).append(label)
        return [(each, incoming[each[0]]) for each in labels.values()]

    def _run_jax(self, see: Callable[..., None]) -> None:
        """Run the JAX side, and give each of its arrays to `see`."""
        results = self.reference.trace.results
        trace_jax(
            self.problem,
            self.reference.dtype,
            results.forward if self.direction is FORWARD else results,
            self.reference.cast_to,
            evaluator=partial(WatchingEvaluator, see),
        )
