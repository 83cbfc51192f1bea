"""The substitution test: does JAX compute a torch call, of something else than torch does?

Where a layer and the code around it are both suspects, the torch layer is run on what JAX computes.
If JAX has the result, too, JAX's layer is right, and the code around gave it something else.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.locate.evidence import FORWARD, Evidence
from parity_tests.engine.locate.frameworks import recording
from parity_tests.engine.locate.record import Call, Trace
from parity_tests.engine.locate.search import watched
from parity_tests.engine.locate.values import is_telling, layouts
from parity_tests.engine.problem import Problem


class Substitution:
    """Runs torch's calls on JAX's arrays, in the direction of the evidence."""

    def __init__(self, problem: Problem, evidence: Evidence):
        self.problem, self.evidence, self.direction = problem, evidence, evidence.direction
        calls = evidence.trace.calls
        slots = (self.direction.taken, self.direction.given)
        self._of_torch = _Norms(evidence.reference.dtype, evidence.least)
        for call in calls:
            for slot in slots:
                for array in self._telling(call, slot).values():
                    self._of_torch.add(array)
        names = [call.name for call in calls]
        self._once = {call for call in calls if names.count(call.name) == 1}

    def computes_of_another(self, calls: Sequence[Call]) -> dict[Call, bool]:
        """Does JAX compute what these calls compute, each of an array that torch's does not take?

        Calls for which that says nothing are left out: forward, those that JAX may compute
        elsewhere with the same weights or without any.
        """
        run_again = self.evidence.reference.run_again
        if run_again is None:
            return {}
        asked = [
            (call, *each)
            for call in calls
            if self._telling(call, self.direction.given)
            and (self.direction is not FORWARD or (call.weights and call in self._once))
            for each in self._telling(call, self.direction.taken).items()
        ]
        if not asked:
            return {}
        others, of_jax = self._others({taken.size for *_, taken in asked})
        found: dict[Call, bool] = {}
        for call, label, taken in asked:
            fitting = [
                each
                for other in others.get(taken.size, [])
                for _, each in layouts(other, taken.shape)
                if each.shape == taken.shape
            ]
            given = run_again(self.evidence.reference.number[call], self.direction, label, fitting)
            found[call] = found.get(call, False) or any(
                array in of_jax and array not in self._of_torch and not _is_same(array, other)
                for other, rows in zip(fitting, given, strict=True)
                for key, array in rows.items()
                if key in self._telling(call, self.direction.given)
            )
        return found

    def _telling(self, call: Call, slot: str) -> dict[str, np.ndarray]:
        return {label: array for label, array in call.slots[slot].items() if is_telling(array)}

    def _others(self, sizes: set[int]) -> "tuple[dict[int, list[np.ndarray]], _Norms]":
        """JAX's arrays of some sizes, each once, and the norms of all."""
        of_jax = _Norms(self.evidence.reference.dtype, self.evidence.least)
        kept: dict[int, list[np.ndarray]] = {}

        def see(value: np.ndarray, *, is_summand: bool = False) -> None:
            value = np.asarray(value, float)
            if not is_telling(value) or not np.isfinite(value).all():
                return
            if value.size in sizes and value not in of_jax:
                kept.setdefault(value.size, []).append(np.array(value))
            of_jax.add(value)

        results = self.evidence.reference.run.results
        with recording(Trace(), self.problem) as side:
            JaxSide(side, transform=lambda function: watched(function, see)).run(
                side,
                self.evidence.reference.dtype,
                results.forward if self.direction is FORWARD else results,
            )
        return kept, of_jax


def _is_same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.size == b.size and np.array_equal(np.sort(a, axis=None), np.sort(b, axis=None))


class _Norms:
    """Arrays that are known by norms, whatever the order of their axes."""

    ORDERS = (1, 2, 3, 4)

    def __init__(self, dtype: str, bound: float):
        self._bound = max(bound, float(jnp.finfo(dtype).eps))
        self._by_size: dict[int, list[np.ndarray]] = {}

    def add(self, array: np.ndarray) -> None:
        self._by_size.setdefault(array.size, []).append(self._norms(array))

    def __contains__(self, array: np.ndarray) -> bool:
        known, norms = self._by_size.get(array.size, []), self._norms(array)
        return any((abs(each - norms) <= self._bound * norms).all() for each in known)

    def _norms(self, array: np.ndarray) -> np.ndarray:
        flat = np.asarray(array, float).ravel()
        with np.errstate(over="ignore"):
            return np.array([np.linalg.norm(flat, order) for order in self.ORDERS])
