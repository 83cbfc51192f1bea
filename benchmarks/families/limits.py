"""What the machine can do.

Three limits are measured, each with the framework that is faster at it: a product of two matrices;
`a + s b` over arrays that are larger than the caches, written into an existing array; and a call
that computes almost nothing.
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
    """One of the three measured limits."""

    kind: str
    size: int
    parts = (FORWARD,)

    @property
    def name(self) -> str:
        """The kind of limit and the size."""
        return f"{self.kind} {self.size}"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of both arrays."""
        return (self.size, self.size) if self.kind == "matmul" else (self.size,)

    def arrays(self):
        """Two random arrays."""
        a, b = np.random.default_rng(0).standard_normal((2, *self.shape), np.float32)
        return {"a": a, "b": b}

    def oracle(self):
        """Computes the result in float64."""
        a, b = (x.astype(np.float64) for x in self.arrays().values())
        return {"y": a @ b if self.kind == "matmul" else a + 3 * b}


def problems(quick: bool) -> list[Limit]:
    """The three limits, of the same sizes in a quick run."""
    return [Limit("matmul", MATMUL), Limit("triad", TRIAD), Limit("dispatch", DISPATCH)]


contenders = Contenders()


@contenders.jax(OURS)
def ours(problem: Limit) -> Function | Call:
    """XLA. The triad writes its result in place of the one before."""
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
    """PyTorch. The triad writes into an existing array, too."""
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
    """Measures the limits of the machine."""
    return limits(compare(session, __name__, contenders, problems(session.quick)))


def limits(outcome: Outcome) -> Limits:
    """The limits, computed from the best times of each problem."""
    best = {p.kind: min(r.ms for r in outcome.rows if r.problem == p.name) for p in problems(False)}
    return Limits(
        gflops=2e-6 * MATMUL**3 / best["matmul"],
        gbytes=12e-6 * TRIAD / best["triad"],
        dispatch_us=1e3 * best["dispatch"],
    )
