"""Constants that one side has rounded to float32, where the other has more digits of them.

Rotary frequencies are an example: torch keeps them in a float32 buffer that is in no `state_dict`,
and a port computes them. In float64 the sides then differ by the rounding of the constants. It
explains a difference if constants that are moved within that rounding make it vanish.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from parity_tests.engine.casts import is_rounded
from parity_tests.engine.jax_side import JaxSide
from parity_tests.engine.problem import Problem
from parity_tests.engine.results import (
    GROUPS,
    ErrorsByGroup,
    Results,
    errors_of,
    largest_by_group,
    only_floating,
)
from parity_tests.engine.tolerance import CONSTANT_ULPS, FLOAT64, ROUNDED_RUNS, finite, rms, ulp

if TYPE_CHECKING:
    from parity_tests.engine.reference import Reference

MOST = 256
"""Numbers that are fitted; of more only the scatter is known."""
ROUNDS = 4
STEP = 1e-4
COLLINEAR = 1e-9
"""The effect, of the largest, of combinations of constants that are left alone."""
LEAST = 1e-6
"""The size that a tensor counts with, of the largest of its group, if its own is less."""


def rounded_count(values: Sequence[np.ndarray]) -> int:
    """How many numbers of constants are rounded to float32."""
    return int(sum(is_rounded(value).sum() for value in values))


def moves_of(values: Sequence[np.ndarray], moves: np.ndarray) -> list[np.ndarray]:
    """For each constant, moves of its rounded numbers, in order, and none of the others."""
    parts, start = [], 0
    for value in values:
        free = is_rounded(value)
        part = np.zeros(value.shape)
        part[free] = moves[start : start + free.sum()]
        start += free.sum()
        parts.append(part)
    return parts


def random_moves(values: Sequence[np.ndarray], seed: int) -> Iterator[list[np.ndarray]]:
    """Moves of constants within their rounding, at random."""
    rng, count = np.random.default_rng(seed), rounded_count(values)
    for _ in range(ROUNDED_RUNS // 2 if count else 0):
        yield moves_of(values, CONSTANT_ULPS * ulp(np.float32) * rng.uniform(-1, 1, count))


class Constants:
    """The constants of both sides, and what moving them does to the results."""

    def __init__(self, problem: Problem, jax_side: JaxSide, reference: Reference):
        self._problem, self._jax_side, self._reference = problem, jax_side, reference
        self._theirs, self._ours = reference.constants(), jax_side.constants_of(problem)
        self.count = reference.constant_count + rounded_count(self._ours)

    def of_jax(self, moves: Sequence[np.ndarray]) -> Results:
        """The JAX side with its constants moved."""
        oracle, cast_to = self._reference.oracle, self._reference.cast_to
        return self._jax_side.run(self._problem, "float64", oracle, cast_to, moves)

    def scatter(self, ours: Results) -> ErrorsByGroup:
        """The largest errors of each side where its constants are off by their rounding."""
        runs = (
            errors_of(self.of_jax(moves), ours)
            for moves in random_moves(self._ours, self._problem.seed)
        )
        return largest_by_group([self._reference.constant_scatter, *runs])

    def fitted(self, ours: Results) -> tuple[Results, Results] | None:
        """Both sides with the constants, within their rounding, that bring them closest.

        Numbers that no constants explain have no say: a wrong gradient does not move the outputs.
        None if the constants are too many, or those of a record.
        """
        values = [*self._theirs, *self._ours]
        if not 0 < self.count <= MOST or rounded_count(values) < self.count:
            return None
        oracle = self._reference.oracle
        scales = {}
        for group in GROUPS:
            sizes = {n: rms(finite(a)) for n, a in only_floating(oracle.get(group, {})).items()}
            least = LEAST * max(sizes.values(), default=0.0) or 1.0
            scales |= {(group, name): max(size, least) for name, size in sizes.items()}
        scales = {place: scale for place, scale in scales.items() if place[0] in ours}

        def flat(results: Results) -> np.ndarray:
            flat = np.concatenate([np.ravel(results[g][n]) / s for (g, n), s in scales.items()])
            flat = np.where(np.isfinite(flat), flat, 0)
            return flat.view(np.float64) if np.iscomplexobj(flat) else flat

        def moved(moves: np.ndarray) -> tuple[Results, Results]:
            parts, count = moves_of(values, moves), len(self._theirs)
            return self._reference.with_constants(parts[:count]), self.of_jax(parts[count:])

        def difference(moves: np.ndarray) -> np.ndarray:
            theirs, ours = moved(moves)
            return flat(ours) - flat(theirs)

        moves = np.zeros(self.count)
        start = difference(moves)
        slopes = np.stack(
            [(difference(STEP * unit) - start) / STEP for unit in np.eye(self.count)], axis=1
        )
        most = CONSTANT_ULPS * ulp(np.float32)
        explicable = np.abs(start) <= most * np.abs(slopes).sum(axis=1) + FLOAT64
        for _ in range(ROUNDS):
            off = difference(moves)[explicable]
            step = np.linalg.lstsq(slopes[explicable], -off, rcond=COLLINEAR)[0]
            moves = np.clip(moves + step, -most, most)
        return moved(moves)
