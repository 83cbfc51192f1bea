"""The peak memory of Hawk over 65,536 steps, forward and backward.

The model has six blocks of width 64. The memory is what the compiler plans for arguments, results
and temporaries.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.problem import BOTH, OURS, Contenders, Function, Sequences
from jax_models import HawkBlock, Stack


@dataclasses.dataclass(frozen=True)
class Hawk(Sequences):
    """Six Hawk blocks over sequences of these sizes."""

    parts = (BOTH,)
    rounds = 2

    @property
    def name(self) -> str:
        """The sizes, in a few words."""
        return f"6 HawkBlocks, T {self.time}, width {self.features}"


def problems(quick: bool) -> list[Hawk]:
    """A row of 65,536 steps, or of 4,096 in a quick run."""
    return [Hawk(1, 4096 if quick else 65536, 64)]


contenders = Contenders()


def _stack(problem: Hawk, **options) -> Function:
    rngs = nnx.Rngs(0)
    options = {"parameterization": "direct", "rngs": rngs}
    blocks = [HawkBlock(problem.features, 3 * problem.features, **options) for _ in range(6)]
    graphdef, weights, rest = nnx.split(Stack(blocks, **options), nnx.Param, ...)
    x = jnp.asarray(np.random.default_rng(0).standard_normal(problem.shape, np.float32))

    def apply(params):
        x, weights = params
        return nnx.merge(graphdef, weights, rest)(x)[0]

    return Function((x, weights), apply, lambda gradients: {})


@contenders.jax(OURS)
def ours(problem: Hawk):
    """Keeps all intermediate results that the backward pass needs."""
    return _stack(problem)


@contenders.jax(f"{OURS}, remat dots")
def ours_dots(problem: Hawk):
    """Keeps the results of matrix products, and computes the rest again."""
    return _stack(problem, remat="dots")


@contenders.jax(f"{OURS}, remat full")
def ours_full(problem: Hawk):
    """Keeps only the inputs and outputs of blocks."""
    return _stack(problem, remat="full")
