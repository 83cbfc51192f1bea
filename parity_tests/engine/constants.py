"""Constants that one side has rounded to float32, where the other has more digits of them.

Rotary frequencies are an example: torch keeps them in a float32 buffer that is in no `state_dict`,
and a port computes them. In float64 the sides then differ by the rounding of the constants. It
explains a difference if constants that are moved within that rounding make it vanish.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np
import torch

from parity_tests.engine.casts import is_rounded
from parity_tests.engine.frameworks import words
from parity_tests.engine.problem import Problem, twin_in
from parity_tests.engine.run import GROUPS, JaxSide, Results, only_floating, run_oracle
from parity_tests.engine.tolerance import CONSTANT_ULPS, ROUNDED_RUNS, finite, rms, ulp

MOST = 256
"""Numbers that are fitted; of more only the scatter is known."""
ROUNDS = 4
STEP = 1e-4
COLLINEAR = 1e-9
"""The effect, of the largest, of combinations of constants that are left alone."""
LEAST = 1e-6
"""The size that a tensor counts with, of the largest of its group, if its own is less."""


@dataclasses.dataclass
class Constants:
    """The constants of both sides, and what moving them does to the results."""

    problem: Problem
    jax_side: JaxSide
    oracle: Results
    casts: Sequence[str]

    def __post_init__(self):
        """Find them."""
        self._twin = twin_in(self.problem.twin, "float64")
        self._names = [
            name
            for name, tensor in named_constants(self.problem, self.problem.twin)
            if is_rounded(tensor.detach().double().numpy()).any()
        ]
        by_name = dict(named_constants(self.problem, self._twin))
        theirs = [by_name[name].detach().numpy() for name in self._names]
        self._values = [*theirs, *self.jax_side.constants_of(self.problem)]
        self._free = [is_rounded(value) for value in self._values]
        self.count = int(sum(free.sum() for free in self._free))

    def moved(self, moves: np.ndarray) -> tuple[Problem, list[np.ndarray]]:
        """The problem with torch's constants moved by parts of their size, and JAX's moves."""
        parts, start = [], 0
        for value, free in zip(self._values, self._free, strict=True):
            part = np.zeros(value.shape)
            part[free] = moves[start : start + free.sum()]
            start += free.sum()
            parts.append(part)
        count = len(self._names)
        twin = twin_in(self._twin, "float64")
        with torch.no_grad():
            by_name = dict(named_constants(self.problem, twin))
            for name, part in zip(self._names, parts[:count], strict=True):
                by_name[name].mul_(torch.from_numpy(1 + part))
        return dataclasses.replace(self.problem, twin=twin), parts[count:]

    def of_torch(self, moves: np.ndarray) -> Results:
        """The torch side with its constants moved."""
        return run_oracle(self.moved(moves)[0])[0]

    def of_jax(self, moves: np.ndarray) -> Results:
        """The JAX side with its constants moved."""
        parts = self.moved(moves)[1]
        return self.jax_side.run(self.problem, "float64", self.oracle, self.casts, parts)

    def scatter(self, ours: Results) -> Iterator[tuple[Results, Results]]:
        """Results of each side whose constants are off by their rounding at random, and without."""
        rng = np.random.default_rng(self.problem.seed)
        for _ in range(ROUNDED_RUNS // 2):
            moves = CONSTANT_ULPS * ulp(np.float32) * rng.uniform(-1, 1, self.count)
            if self._names:
                yield self.of_torch(moves), self.oracle
            if len(self._names) < len(self._values):
                yield self.of_jax(moves), ours

    def fitted(self, ours: Results) -> tuple[Results, Results] | None:
        """Both sides with the constants, within their rounding, that bring them closest."""
        if not 0 < self.count <= MOST:
            return None
        scales = {}
        for group in GROUPS:
            sizes = {
                n: rms(finite(a)) for n, a in only_floating(self.oracle.get(group, {})).items()
            }
            least = LEAST * max(sizes.values(), default=0.0) or 1.0
            scales |= {(group, name): max(size, least) for name, size in sizes.items()}
        scales = {place: scale for place, scale in scales.items() if place[0] in ours}

        def flat(results: Results) -> np.ndarray:
            flat = np.concatenate([np.ravel(results[g][n]) / s for (g, n), s in scales.items()])
            flat = np.where(np.isfinite(flat), flat, 0)
            return flat.view(np.float64) if np.iscomplexobj(flat) else flat

        def difference(moves: np.ndarray) -> np.ndarray:
            return flat(self.of_jax(moves)) - flat(self.of_torch(moves))

        moves = np.zeros(self.count)
        start = difference(moves)
        slopes = np.stack(
            [(difference(STEP * unit) - start) / STEP for unit in np.eye(self.count)], axis=1
        )
        most = CONSTANT_ULPS * ulp(np.float32)
        for _ in range(ROUNDS):
            step = np.linalg.lstsq(slopes, -difference(moves), rcond=COLLINEAR)[0]
            moves = np.clip(moves + step, -most, most)
        return self.of_torch(moves), self.of_jax(moves)


def named_constants(problem: Problem, twin: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The floating tensors of a copy of the twin that the JAX side does not read."""
    read = twin.state_dict().keys() - problem.constants
    seen: set[int] = set()
    for path, module in twin.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        plain = {name: value for name, value in vars(module).items() if name[:1] != "_"}
        for at, tensor in jax.tree_util.tree_leaves_with_path({**plain, **module._buffers}):
            key = ".".join(filter(None, (path, words(at))))
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.is_floating_point()
                and not isinstance(tensor, torch.nn.Parameter)
                and key not in read
                and id(tensor) not in seen
            ):
                seen.add(id(tensor))
                yield key, tensor
