"""The peak memory of Hawk over 65,536 steps, forward and backward.

Six blocks of width 64; what the compiler lays out for arguments, results and temporaries.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.problem import BOTH, OURS, Contenders, Function, Sequences
from jax_models import HawkBlock, Stack


@dataclasses.dataclass(frozen=True)
class Hawk(Sequences):
    """Six blocks over such sequences."""

    parts = (BOTH,)
    rounds = 2

    @property
    def name(self) -> str:
        """The sizes."""
        return f"6 HawkBlocks, T {self.time}, width {self.features}"


def problems(quick: bool) -> list[Hawk]:
    """A row of 65,536 steps."""
    return [Hawk(1, 4096 if quick else 65536, 64)]


contenders = Contenders()


def _stack(problem: Hawk, **options) -> Function:
    rngs = nnx.Rngs(0)
    blocks = [HawkBlock(problem.features, 3 * problem.features, rngs=rngs) for _ in range(6)]
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


@contenders.jax(f"{OURS}, remat dots")
def ours_dots(problem: Hawk):
    """The results of matrix products are kept, the rest computed again."""
    return _stack(problem, remat="dots")


@contenders.jax(f"{OURS}, remat full")
def ours_full(problem: Hawk):
    """Only what goes in and out of the blocks is kept."""
    return _stack(problem, remat="full")
