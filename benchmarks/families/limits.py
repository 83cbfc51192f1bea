"""What the machine can do.

A product of two matrices, and `a + s b` over arrays that fit no cache, into an array that is there
already, by whichever framework is the fastest at it; and a call that computes next to nothing.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.compare import Session, compare
from benchmarks.outcome import Outcome
from benchmarks.problem import FORWARD, OURS, Call, Contenders, Function, Limits, Problem, operator

MATMUL, TRIAD, DISPATCH = 2048, 2**24, 8


@dataclasses.dataclass(frozen=True)
class Limit(Problem):
    """One of the three."""

    kind: str
    size: int
    parts = (FORWARD,)

    @property
    def name(self) -> str:
        """What, and how large."""
        return f"{self.kind} {self.size}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of both arrays."""
        return (self.size, self.size) if self.kind == "matmul" else (self.size,)

    def arrays(self):
        """Two of them."""
        a, b = np.random.default_rng(0).standard_normal((2, *self.shape), np.float32)
        return {"a": a, "b": b}

    def oracle(self):
        """In float64."""
        a, b = (x.astype(np.float64) for x in self.arrays().values())
        return {"y": a @ b if self.kind == "matmul" else a + 3 * b}


def problems(quick: bool) -> list[Limit]:
    """The three."""
    return [Limit("matmul", MATMUL), Limit("triad", TRIAD), Limit("dispatch", DISPATCH)]


contenders = Contenders()


@contenders.jax(OURS)
def ours(problem: Limit) -> Function | Call:
    """XLA's, the result of the triad in the place of the one before."""
    if problem.kind != "triad":
        return _operator(problem)
    a, b = map(jnp.asarray, problem.arrays().values())
    y = jnp.zeros_like(a)
    triad = jax.jit(lambda y, a, b: a + 3 * b, donate_argnums=0, keep_unused=True)

    def call():
        nonlocal y
        y = jax.block_until_ready(triad(y, a, b))

    return Call(call, lambda: call() or {"y": np.array(y)})


@contenders.torch("torch")
def torch_limit(problem: Limit) -> Function | Call:
    """Torch's."""
    import torch

    if problem.kind != "triad":
        return _operator(problem)
    a, b = (torch.tensor(x) for x in problem.arrays().values())
    y = torch.zeros_like(a)

    def call():
        torch.add(a, b, alpha=3, out=y)
        if y.is_cuda:
            torch.cuda.synchronize()

    return Call(call, lambda: call() or {"y": y.cpu().numpy()})


def _operator(problem: Limit) -> Function:
    return operator(problem, lambda a, b: a @ b if problem.kind == "matmul" else a + 3 * b)


def measure_limits(session: Session) -> Limits:
    """Measured now."""
    return limits(compare(session, __name__, contenders, problems(session.quick)))


def limits(outcome: Outcome) -> Limits:
    """From the best times."""
    best = {p.kind: min(r.ms for r in outcome.rows if r.problem == p.name) for p in problems(False)}
    return Limits(
        gflops=2e-6 * MATMUL**3 / best["matmul"],
        gbytes=12e-6 * TRIAD / best["triad"],
        dispatch_us=1e3 * best["dispatch"],
    )
