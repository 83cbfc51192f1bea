"""Times contenders in turn, with a separate process for each framework.

Both processes must have as many threads as there are cores and the same allocator; otherwise, the
run ends with an error. Bursts of calls alternate between the contenders (A B C A B C …). A burst
during which other processes ran does not count. The time is the median of the other bursts.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks.environment import Allocator, Environment, find_environment, without_malloc
from benchmarks.problem import CannotSolve, Contender, Framework, Problem
from jax_models import tune_allocator

ENVIRONMENT = {
    "KERAS_BACKEND": "jax",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # torch is on the same device
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # so that the times to compile are those of compiling
    "JAX_NUMPY_DTYPE_PROMOTION": "standard",  # not all peers work under "strict"
    "JAX_NUMPY_RANK_PROMOTION": "allow",
}
NUM_EXPS = 16
"""Number of exponentials in the computation by which threads are counted.

It is long enough that a thread that wakes up late still finds work to do."""
QUIET_LOAD = 0.05
"""The share of the cores that other processes may use in a burst that counts."""
SLOW_RATIO = 2.5
"""The ratio to the fastest contender above which two bursts are enough."""
COUNT = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(10**6):
        pass
"""
"""The program of a busy process, which also ends if this process is killed."""
CLOCK_ERROR = 0.02
"""The error of the system's clocks of processor time, in seconds."""


class Burst(NamedTuple):
    """A burst of consecutive calls."""

    times: list[float]
    """The seconds of each call."""
    others: float
    """The share of the cores that other processes used in the meantime."""


class Timing(NamedTuple):
    """The time of a contender, computed from its bursts."""

    seconds: float
    calls: int
    disturbed: bool


class Prepared(NamedTuple):
    """A worker's description of a contender that is ready to be timed."""

    compile_s: float | None
    memory: int | None
    result: dict[str, np.ndarray]


class Unsuitable(Exception):  # noqa: N818
    """Raised if a worker cannot measure anything; the message says why."""


class Workers:
    """A process for each framework, started on first use.

    Args:
        platform: the platform of JAX, by default the one that JAX chooses. torch uses the same.
        allocator: `default` leaves malloc as users have it, `tuned` calls `tune_allocator`.

    """

    def __init__(self, platform: str | None = None, allocator: Allocator = "default"):
        self.environment = dict(ENVIRONMENT)
        if platform:  # the variable does not accept "gpu", which is only a name for devices
            self.environment["JAX_PLATFORMS"] = "cuda" if platform == "gpu" else platform
        self.platform = platform
        self.allocator: Allocator = allocator
        self.cores = len(os.sched_getaffinity(0))  # before importing torch, which can reduce it
        self.context = multiprocessing.get_context("spawn")
        self.processes: dict[Framework, tuple[Any, Any]] = {}
        self.devices: dict[Framework, str] = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process, pipe in self.processes.values():
            with contextlib.suppress(ConnectionError):
                pipe.send(None)
            process.join(timeout=10)

    def call(self, framework: Framework, function: Callable, *args) -> Any:
        """Calls a function in the process of a framework, and returns its result.

        Raises:
            Unsuitable: the process has ended.
            ImportError, LeftOut: the function raised it.
            RuntimeError: the function raised something else.

        """
        if framework not in self.processes:
            self.processes[framework] = self._start()
        process, pipe = self.processes[framework]
        try:
            pipe.send((function, args))
            answer, error = pipe.recv()
        except (EOFError, ConnectionError):
            process.join()
            killed = process.exitcode == -signal.SIGKILL
            reason = ", which often means that memory ran out" if killed else ""
            raise Unsuitable(
                f"{framework}: its worker ended with code {process.exitcode}{reason}"
            ) from None
        if error is not None:
            raise error
        return answer

    def _start(self) -> tuple[Any, Any]:
        our_end, worker_end = self.context.Pipe()
        tuned = self.allocator == "tuned"
        process = self.context.Process(target=_work, args=(worker_end, tuned), daemon=True)
        before = dict(os.environ)
        os.environ.clear()
        os.environ.update(without_malloc(before) | self.environment)
        try:
            process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        worker_end.close()
        return process, our_end

    def device(self, framework: Framework) -> str:
        """The platform and the device of a framework, as `platform: device`.

        Raises:
            LeftOut: torch does not have JAX's platform.
            ImportError: the framework is not installed.
            Unsuitable: the worker does not have the threads or the allocator that it should have.

        """
        if framework not in self.devices:
            if framework == "jax":
                self.devices["jax"] = self._jax_device()
            else:
                platform = self.device("jax").split(":")[0]
                self.devices["torch"] = self.call("torch", _torch_device, platform, self.cores)
            self.find_environment(framework)
        return self.devices[framework]

    def _jax_device(self) -> str:
        try:
            return self.call("jax", _jax_device)
        except RuntimeError as error:
            expected = f"--platform: expected one that JAX finds, got {self.platform}"
            raise Unsuitable(f"{expected}: {str(error).splitlines()[0]}") from None

    def environments(self) -> dict[Framework, Environment]:
        """Determines the environment of each framework that was used.

        Raises:
            Unsuitable: a worker does not have the threads or the allocator that it should have.

        """
        return {framework: self.find_environment(framework) for framework in self.devices}

    def find_environment(self, framework: Framework) -> Environment:
        """Determines and checks the environment of one framework.

        Raises:
            Unsuitable: the worker does not have the threads or the allocator that it should have.

        """
        compute = _jax_exp if framework == "jax" else _torch_exp
        found = self.call(framework, find_environment, compute, self.allocator)
        if self.devices[framework].startswith("cpu"):
            for fault in found.faults(self.cores, self.allocator):
                raise Unsuitable(f"{framework}: {fault}; in its environment: {found.variables}")
        return found

    def prepare(
        self, framework: Framework, module: str, name: str, problem: Problem, part: str
    ) -> Prepared:
        """Compiles a contender in its worker, and returns its result."""
        return self.call(framework, _prepare, module, name, problem, part)

    def time(
        self,
        contenders: list[tuple[Framework, str]],
        *,
        rounds: int,
        max_rounds: int,
        num_busy: int = 0,
    ) -> dict[tuple[Framework, str], Timing]:
        """Times prepared contenders, in up to `max_rounds` rounds if other processes run.

        With `num_busy`, it starts so many busy processes, and all bursts count.
        """
        quiet_load = np.inf if num_busy else QUIET_LOAD
        bursts: dict[tuple[Framework, str], list[Burst]] = {key: [] for key in contenders}
        with busy_processes(num_busy):
            for turn in range(max_rounds):
                fastest = min((median(b) for b in bursts.values() if b), default=np.inf)
                for key, found in bursts.items():
                    quiet = sum(burst.others <= quiet_load for burst in found)
                    slow = turn >= 2 and median(found) > SLOW_RATIO * fastest
                    if quiet < (2 if slow else rounds):
                        found.append(self.call(key[0], _burst, key[1]))
        for framework, _ in contenders:
            self.call(framework, _forget)
        return {key: timing(found, quiet_load) for key, found in bursts.items()}


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Starts processes that count, and ends them."""
    processes = [subprocess.Popen([sys.executable, "-S", "-c", COUNT]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def median(bursts: list[Burst]) -> float:
    """The median seconds of a call."""
    return float(np.median([t for burst in bursts for t in burst.times]))


def timing(bursts: list[Burst], quiet_load: float = QUIET_LOAD) -> Timing:
    """The median over the quiet bursts, or over the quietest half if fewer than two are quiet."""
    kept = [burst for burst in bursts if burst.others <= quiet_load]
    disturbed = len(kept) < 2
    if disturbed:
        kept = sorted(bursts, key=lambda burst: burst.others)[: (len(bursts) + 1) // 2]
    return Timing(median(kept), sum(len(burst.times) for burst in kept), disturbed)


def busy_seconds() -> float:
    """The processor time of all processes on our cores, or of this one if that is unknown."""
    ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    try:
        with open("/proc/stat") as file:
            for name, *fields in map(str.split, file):
                if name in ours:
                    user, nice, system, _, _, irq, softirq, steal, *_ = map(int, fields)
                    ticks += user + nice + system + irq + softirq + steal
    except OSError:
        return own_seconds()
    return ticks / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """The processor time of this process."""
    used = os.times()
    return used.user + used.system


# The functions below run in a worker.

_PREPARED: dict[str, tuple[Contender, Callable[[], Any], int]] = {}


def _work(connection, tuned: bool) -> None:
    if tuned:
        tune_allocator()
    while (task := connection.recv()) is not None:
        function, args = task
        try:
            connection.send((function(*args), None))
        except (ImportError, CannotSolve) as error:
            connection.send((None, error))
        except Exception as error:
            connection.send((None, RuntimeError(f"{error!r}\n{traceback.format_exc()}")))


def _prepare(module: str, name: str, problem: Problem, part: str) -> Prepared:
    contender = importlib.import_module(module).contenders[name]
    side = importlib.import_module(f"benchmarks.{contender.framework}_side")
    with contender.tracing():
        call, count, prepared = side.prepare(contender.make(problem), problem, part)
    _PREPARED[name] = contender, call, count
    return prepared


def _burst(name: str, seconds: float = 0.15) -> Burst:
    """Calls a prepared contender for a while.

    In another context than the one in which it was prepared, JAX would compile it again.
    """
    contender, call, count = _PREPARED[name]
    with contender.tracing():
        return burst(call, count, seconds=seconds)


def burst(call: Callable[[], Any], count: int = 1, *, seconds: float) -> Burst:
    """Calls a function, which repeats its work `count` times, for a while.

    The first call warms the caches, and counts only if it is the only one.
    """
    times = []
    busy, own, start = busy_seconds(), own_seconds(), time.perf_counter()
    while not times or time.perf_counter() - start < seconds:
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
    elapsed = time.perf_counter() - start
    others = busy_seconds() - busy - (own_seconds() - own) - CLOCK_ERROR
    cores = len(os.sched_getaffinity(0))
    kept = times[1:] if len(times) > 1 else times
    return Burst([t / count for t in kept], max(0.0, others / elapsed / cores))


def _forget() -> None:
    _PREPARED.clear()


def _jax_device() -> str:
    import jax

    jax.config.update("jax_default_matmul_precision", "highest")
    jax.block_until_ready(jax.jit(lambda x: x + 1)(0.0))  # loads the compiler
    return f"{jax.default_backend()}: {jax.devices()[0].device_kind}"


def _jax_exp(x: np.ndarray) -> None:
    import jax

    jax.block_until_ready(_jax_exps(x.size)())


@cache
def _jax_exps(size: int) -> Callable:
    """Computes on an array on the device, because copying it would keep the main thread busy."""
    import jax

    def exps(x):
        for _ in range(NUM_EXPS):  # jax 0.12 runs such a `fori_loop` on one thread
            x = jax.numpy.exp(-x)
        return x

    return partial(jax.jit(exps), jax.numpy.zeros(size))


def _torch_device(platform: str, threads: int) -> str:
    import torch

    torch.set_num_threads(threads)
    if platform == "cpu":
        return "cpu: cpu"
    if platform != "gpu" or not torch.cuda.is_available():
        raise CannotSolve(f"this torch has no {platform}")
    torch.set_default_device("cuda")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return f"gpu: {torch.cuda.get_device_name()}"


def _torch_exp(x: np.ndarray) -> None:
    import torch

    for _ in range(NUM_EXPS):
        torch.from_numpy(x).exp()
