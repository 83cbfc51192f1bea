"""What is measured: a problem, and the functions that solve it."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray]
Framework = Literal["jax", "torch"]
FORWARD, BOTH = "forward", "forward and backward"
OURS = "twinscan"
"""The name of our contender; variants of it are called `twinscan, …`."""


class Work(NamedTuple):
    """The least that a machine has to do, whatever the method."""

    flops: float = 0.0
    """Of matrix products or transforms."""
    num_bytes: float = 0.0
    """Read and written, if everything between stays in caches."""


class Problem(abc.ABC):
    """Arrays, what is asked of them, and what it should cost. Subclasses are frozen dataclasses."""

    parts: tuple[str, ...] = (FORWARD, BOTH)
    rounds: int = 100
    """Bursts of each contender, at most."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What and how large, in a few words."""

    def arrays(self) -> Arrays:
        """Everything that y depends on, inputs and weights, in float32; always the same."""
        return {}

    def cotangent(self) -> np.ndarray:
        """The gradient of y, in float32; a problem that is differentiated has one."""
        raise NotImplementedError

    def oracle(self) -> Arrays:
        """`y`, and the gradient of each of the arrays under its name, in float64; or nothing."""
        return {}

    def work(self, part: str) -> Work | None:
        """Of a part; None where there is no bound."""
        return None

    def targets(self, part: str, platform: str) -> Mapping[str, float]:
        """Our time over a peer's, at most, by the peer's name.

        `torch` and `JAX peer` are the fastest of each; `limit` is our share of it, at least.
        """
        return {}


@dataclasses.dataclass(frozen=True)
class Sequences(Problem):
    """A problem whose y is (batch, time, features)."""

    batch: int
    time: int
    features: int

    @property
    def name(self) -> str:
        """The sizes."""
        return f"{self.batch} × {self.time} × {self.features}"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of y."""
        return self.batch, self.time, self.features

    def cotangent(self):
        """Random."""
        return np.random.default_rng(1).standard_normal(self.shape, np.float32)


class Function(NamedTuple):
    """A contender that is a function `apply(params) -> y`, to be differentiated by the harness."""

    params: Any
    """Arrays and weights as the framework wants them: a pytree, for torch a flat dictionary."""
    apply: Callable[[Any], Any]
    named: Callable[[Any], Mapping[str, Any]] = dict
    """From gradients that are shaped like `params` to those of the problem's arrays."""


class Call(NamedTuple):
    """A contender that is a call with effects of its own: a training step, some tokens."""

    call: Callable[[], Any]
    """To its end."""
    result: Callable[[], Arrays] = dict
    """What the oracle has, by the first call."""
    parts: int = 1
    """Times are those of a call, over this."""


class LeftOut(Exception):  # noqa: N818
    """A contender that does not take part in a problem, and why."""


class Contender(NamedTuple):
    """Who takes part, and how: `make(problem)`, in a worker of its framework."""

    framework: Framework
    make: Callable[[Any], Function | Call]


class Contenders(dict[str, Contender]):
    """Those of a family by name, ours first. A peer is one decorated function."""

    def jax(self, name: str) -> Callable:
        """`@contenders.jax("peer") def peer(problem) -> Function | Call`."""
        return self._add(name, "jax")

    def torch(self, name: str) -> Callable:
        """The same for torch; tensors that it makes are on the right device."""
        return self._add(name, "torch")

    def _add(self, name: str, framework: Framework) -> Callable:
        def add(make):
            self[name] = Contender(framework, make)
            return make

        return add


def operator(problem: Problem, function: Callable[..., Any]) -> Function:
    """A function of the problem's arrays, by their names."""
    return Function(problem.arrays(), lambda arrays: function(**arrays))


def relative_error(x: np.ndarray, oracle: np.ndarray) -> float:
    """Root mean square of the difference over that of the oracle."""
    scale = np.sqrt(np.mean(np.square(oracle)))
    return float(np.sqrt(np.mean(np.square(x - oracle))) / scale)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What this machine can do, measured in the same run."""

    gflops: float
    """Of a float32 matrix product, 1e9 operations a second."""
    gbytes: float
    """Of `a + s b` over arrays that fit no cache, 1e9 bytes a second."""
    dispatch_us: float
    """Of a call that computes next to nothing."""

    def ms(self, work: Work) -> float:
        """The least time of some work."""
        return 1e-6 * max(work.flops / self.gflops, work.num_bytes / self.gbytes)
