"""The diagonal recurrence, `h_t = a_t ⊙ h_{t−1} + b_t`."""

import math
from functools import partial

import jax
import numpy as np

from benchmarks.families.plain.pairs import run_linear_recurrence
from benchmarks.oracle import in_float64
from benchmarks.problem import FORWARD, OURS, Contenders, Sequences, Work, operator
from jax_models.ops import linear_recurrence


class Diagonal(Sequences):
    """A diagonal recurrence with random decays and inputs."""

    def arrays(self):
        """Decays close to 1, and inputs."""
        rng = np.random.default_rng(0)
        return {
            "a": rng.uniform(0.9, 0.999, self.shape).astype(np.float32),
            "b": rng.standard_normal(self.shape, np.float32),
        }

    def oracle(self):
        """Computes the definition in float64."""
        return in_float64(
            partial(run_linear_recurrence, "definition"), self.arrays(), self.cotangent()
        )

    def work(self, part):
        """Reads a and b, writes h; backward reads a, h and its gradient, writes two gradients."""
        return Work(num_bytes=4 * math.prod(self.shape) * (3 if part == FORWARD else 8))

    def targets(self, part, platform):
        """The largest allowed ratios of our time to the peers'."""
        if platform != "cpu":
            return {"limit": 0.7, "lax.associative_scan": 1 / 3}
        torch_target = (0.6 if self.time < 10_000 else 0.06) if part == FORWARD else 0.35
        peers = {"torch": torch_target, "recurrentgemma": 0.65, "lax.associative_scan": 0.33}
        return peers | {"limit": 0.3}


def problems(quick: bool) -> list[Diagonal]:
    """A wide batch, a long single row, and a language model's sizes."""
    sizes = [(4, 2048, 1024), (1, 32768, 256), (32, 128, 192)]
    return [Diagonal(*size) for size in (sizes[-1:] if quick else sizes)]


contenders = Contenders()


@contenders.jax(OURS)
def ours(problem: Diagonal):
    """Our operator with its default options."""
    return operator(problem, lambda a, b: linear_recurrence(a, b)[0])


@contenders.jax(f"{OURS}, associative")
def ours_associative(problem: Diagonal):
    """Our operator with the method for a time axis that must be parallel."""
    return operator(problem, lambda a, b: linear_recurrence(a, b, method="associative")[0])


@contenders.jax("recurrentgemma")
def recurrentgemma(problem: Diagonal):
    """DeepMind's scan."""
    import typeguard  # pyright: ignore[reportMissingImports]

    typeguard.typechecked = lambda f: f  # recurrentgemma's annotations fail under typeguard 4
    from recurrentgemma.jax import scan  # pyright: ignore[reportMissingImports]

    return operator(problem, lambda a, b: scan.linear_scan(b, a)[0])


@contenders.jax("lax.associative_scan")
def associative_scan(problem: Diagonal):
    """The straightforward version in JAX."""

    def combine(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    return operator(problem, lambda a, b: jax.lax.associative_scan(combine, (a, b), axis=1)[1])


@contenders.torch("torch loop")
def torch_loop(problem: Diagonal):
    """The straightforward version in torch."""
    import torch

    def loop(a, b):
        h, hs = torch.zeros_like(b[:, 0]), []
        for a_t, b_t in zip(a.unbind(1), b.unbind(1), strict=True):
            h = a_t * h + b_t
            hs.append(h)
        return torch.stack(hs, dim=1)

    return operator(problem, loop)
