"""Problems to measure, and the contenders that solve them."""

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple
from unittest import mock

import jax
import numpy as np

from jax_models.ops import forms
from jax_models.ops.attention import ATTENTION

Arrays = dict[str, np.ndarray]
Framework = Literal["jax", "torch"]
FORWARD, BOTH = "forward", "forward and backward"
OURS = "twinscan"
"""The name of our contender, which never runs the kernels of twinscan-native. Variants of it are
called `twinscan, …`.
"""
NATIVE = f"{OURS}, native"
"""The name of our contender that may run the kernels of twinscan-native."""


class Work(NamedTuple):
    """The least work of a problem, whatever the method."""

    flops: float = 0.0
    """Operations of matrix products and Fourier transforms."""
    num_bytes: float = 0.0
    """Bytes that are read and written if all intermediate results stay in caches."""


class Problem(abc.ABC):
    """Arrays, the expected result and the target times. Subclasses are frozen dataclasses."""

    parts: tuple[str, ...] = (FORWARD, BOTH)
    rounds: int = 100
    """The largest number of bursts of each contender."""
    num_busy: int = 0
    """The number of busy processes that compete for the cores while the contenders are timed."""
    solved_by: tuple[str, ...] | None = None
    """The names of the contenders that solve it; None: all of its family."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name and the sizes of the problem, in a few words."""

    def arrays(self) -> Arrays:
        """The inputs and weights that y depends on, in float32. Each call returns the same."""
        return {}

    def cotangent(self) -> np.ndarray:
        """The gradient of the loss by y, in float32. Needed if the backward pass is measured."""
        raise NotImplementedError  # a problem with a backward pass defines it

    def oracle(self) -> Arrays:
        """`y`, and the gradients under the names of the arrays, in float64. Empty: no errors."""
        return {}

    def work(self, part: str) -> Work | None:
        """The least work of a part; None if there is no useful bound."""
        return None

    def targets(self, part: str, platform: str) -> Mapping[str, float]:
        """The largest allowed ratio of our time to another contender's, by its name.

        The names `torch` and `JAX peer` stand for the fastest peer of each framework. For `limit`,
        the value is the least share of the machine's limit that we should reach.
        """
        return {}

    def targets_with_kernels(self, part: str, platform: str) -> Mapping[str, float]:
        """The same for our contender with the kernels of twinscan-native."""
        return self.targets(part, platform)


@dataclasses.dataclass(frozen=True)
class Sequences(Problem):
    """A problem whose y has the shape (batch, time, features)."""

    batch: int
    time: int
    features: int

    @property
    def name(self) -> str:
        """The batch size, the number of steps and the number of features."""
        return f"{self.batch} × {self.time} × {self.features}"

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of y."""
        return self.batch, self.time, self.features

    def cotangent(self):
        """A random gradient."""
        return np.random.default_rng(1).standard_normal(self.shape, np.float32)


class Function(NamedTuple):
    """A contender that is a function `apply(params) -> y`, to be differentiated by the harness."""

    params: Any
    """The arrays and weights: a pytree, or a flat dictionary for torch."""
    apply: Callable[[Any], Any]
    named: Callable[[Any], Mapping[str, Any]] = dict
    """Maps gradients with the structure of `params` to gradients of the problem's arrays."""


class Call(NamedTuple):
    """A contender that is a call with side effects, such as a training step."""

    call: Callable[[], Any]
    """The function to time, which waits for its results."""
    result: Callable[[], Arrays] | None = None
    """Makes the first call, and returns its results under the oracle's names. None: no results."""
    parts: int = 1
    """The number of repetitions in one call. The time of a call is divided by it."""

    def first(self) -> Arrays:
        """Makes the first call, and returns its results."""
        if self.result is None:
            self.call()
            return {}
        return self.result()


class CannotSolve(Exception):  # noqa: N818
    """Raised by a contender that cannot solve a problem; the message says why."""


@contextlib.contextmanager
def with_kernels() -> Iterator[None]:
    """Traces operators as usual. Raises `CannotSolve` if twinscan-native is not installed."""
    native = ATTENTION.forms["native"]
    if native in ATTENTION.other_forms:  # it stands for the package, and refuses every call
        raise CannotSolve(native.refusal(None))
    yield


_available = jax.make_user_context("all")
"""The forms that are available. A context of JAX, which traces functions again in another one."""


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Traces operators as if twinscan-native were not installed."""

    def own_forms(operator: forms.Operator) -> Mapping[str, forms.Form]:
        return {form.name: form for form in (*operator.own_forms, *operator.other_forms)}

    with mock.patch.object(forms, "_forms", own_forms), _available("own"):
        yield


@contextlib.contextmanager
def only_definitions() -> Iterator[None]:
    """Traces operators as if their definitions were their only forms."""
    run = forms.Operator.__call__

    def by_definition(operator: forms.Operator, call: Any, method: str = "auto") -> Any:
        return run(operator, call, operator.own_forms[-1].name)

    with mock.patch.object(forms.Operator, "__call__", by_definition), _available("definitions"):
        yield


class Contender(NamedTuple):
    """A contender: `make(problem)` runs in the worker of its framework."""

    framework: Framework
    make: Callable[[Any], Function | Call]
    kernels: bool
    """Whether it may run the kernels of twinscan-native."""

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """The context in which its functions are traced."""
        return with_kernels() if self.kernels else without_kernels()


class Contenders(dict[str, Contender]):
    """The contenders of a family by name, ours first. Each is one decorated function."""

    def jax(self, name: str, *, kernels: bool = False) -> Callable:
        """Decorates a JAX contender: `@contenders.jax("peer") def peer(problem) -> Function`.

        Only with `kernels` may it run those of twinscan-native.
        """
        return self._add(name, "jax", kernels)

    def torch(self, name: str) -> Callable:
        """Decorates a torch contender. Tensors are created on the right device."""
        return self._add(name, "torch", kernels=False)

    def _add(self, name: str, framework: Framework, kernels: bool) -> Callable:
        def add(make):
            self[name] = Contender(framework, make, kernels)
            return make

        return add


def operator(problem: Problem, function: Callable[..., Any]) -> Function:
    """A contender that passes the problem's arrays to a function, as keyword arguments."""
    return Function(problem.arrays(), lambda arrays: function(**arrays))


def relative_error(x: np.ndarray, oracle: np.ndarray) -> float:
    """The root mean square of the difference, divided by that of the oracle."""
    scale = np.sqrt(np.mean(np.square(oracle)))
    return float(np.sqrt(np.mean(np.square(x - oracle))) / scale)


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of this machine, measured in the same run."""

    gflops: float
    """Speed of a float32 matrix product, in 1e9 operations per second."""
    gbytes: float
    """Speed of `a + s b` over arrays larger than the caches, in 1e9 bytes per second."""
    dispatch_us: float
    """Time of a call that computes almost nothing, in microseconds."""

    def ms(self, work: Work) -> float:
        """The least time for some work, in milliseconds."""
        return 1e-6 * max(work.flops / self.gflops, work.num_bytes / self.gbytes)
