"""The peak memory of Hawk over 65,536 steps, forward and backward.

Four blocks of width 192; what the compiler lays out for arguments, results and temporaries.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.problem import BOTH, OURS, Contenders, Function, Sequences
from jax_models import HawkBlock, Stack


@dataclasses.dataclass(frozen=True)
class Hawk(Sequences):
    """Four blocks over such sequences."""

    parts = (BOTH,)
    rounds = 2

    @property
    def name(self) -> str:
        """The sizes."""
        return f"4 HawkBlocks, T {self.time}, width {self.features}"


def problems(quick: bool) -> list[Hawk]:
    """A row of 65,536 steps."""
    return [Hawk(1, 4096 if quick else 65536, 192)]


contenders = Contenders()


def _stack(problem: Hawk, **options) -> Function:
    rngs = nnx.Rngs(0)
    blocks = [HawkBlock(problem.features, 3 * problem.features, rngs=rngs) for _ in range(4)]
    graphdef, weights, rest = nnx.split(Stack(blocks, **options), nnx.Param, ...)
    x = jnp.asarray(np.random.default_rng(0).standard_normal(problem.shape, np.float32))

    def apply(params):
        x, weights = params
        return nnx.merge(graphdef, weights, rest)(x)[0]

    return Function((x, weights), apply, lambda gradients: {})


@contenders.jax(OURS)
def ours(problem: Hawk):
    """All that the backward pass needs is kept."""
    return _stack(problem)


@contenders.jax(f"{OURS}, remat")
def ours_remat(problem: Hawk):
    """Only what goes in and out of the blocks is kept, the rest computed again."""
    return _stack(problem, remat="full")
