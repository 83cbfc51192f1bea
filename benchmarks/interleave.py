"""Contenders timed by turns, each framework in a process of its own.

Fresh large allocations cost more than most kernels here, so both sides run with a malloc that keeps
its memory. Bursts of calls alternate between the contenders (A B C A B C …); a time is the median
over all calls, and compilation is timed apart.
"""

import dataclasses
import importlib
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

ENVIRONMENT = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "1099511627776",
    "MALLOC_ARENA_MAX": "1",
    "OMP_PROC_BIND": "true",
    "JAX_PLATFORMS": "cpu",
}


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A contender, ready to be timed."""

    run: Callable[[], Any]
    """One call, to its end."""
    result: Callable[[], list[np.ndarray]]
    """What it computes."""
    compile_s: float | None
    """Seconds to compile; None where nothing is compiled."""
    memory: int | None
    """Bytes of arguments, results and temporaries; None where it is not known."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """What came of a contender."""

    name: str
    ms: float
    compile_s: float | None
    memory: int | None
    errors: list[float]
    """Of each result, root mean square, relative to the oracle's."""


def measure(
    module: str, contenders: Sequence[tuple[str, str]], arguments: tuple, oracle: list[np.ndarray]
) -> list[Measured]:
    """Time `prepare(name, *arguments)` of a module for all (framework, name).

    A contender whose package is not installed is left out.
    """
    os.environ |= ENVIRONMENT
    context = multiprocessing.get_context("spawn")
    workers, compiled = {}, {}
    for framework, name in contenders:
        if framework not in workers:
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, module), daemon=True)
            process.start()
            workers[framework] = ours
        workers[framework].send(("prepare", name, arguments))
        answer = workers[framework].recv()
        if isinstance(answer, ImportError):
            print(f"{name}: left out, {answer}")
        elif isinstance(answer, Exception):
            raise answer
        else:
            compiled[framework, name] = answer
    times = {key: [] for key in compiled}
    for _ in range(5):
        for framework, name in compiled:
            workers[framework].send(("burst", name))
            times[framework, name] += workers[framework].recv()
    for worker in workers.values():
        worker.send(None)
    return [
        Measured(
            name,
            1e3 * float(np.median(times[framework, name])),
            compile_s,
            memory,
            [relative_error(x, y) for x, y in zip(results, oracle, strict=True)],
        )
        for (framework, name), (compile_s, memory, results) in compiled.items()
    ]


def relative_error(x: np.ndarray, oracle: np.ndarray) -> float:
    """Root mean square of the difference over that of the oracle."""
    return float(np.sqrt(np.mean((x - oracle) ** 2) / np.mean(oracle**2)))


def _work(connection, module: str) -> None:
    prepare = importlib.import_module(module).prepare
    prepared: dict[str, Prepared] = {}
    while (message := connection.recv()) is not None:
        if message[0] == "prepare":
            _, name, arguments = message
            try:
                contender = prepared[name] = prepare(name, *arguments)
                connection.send((contender.compile_s, contender.memory, contender.result()))
            except Exception as error:
                connection.send(error)
        else:
            connection.send(_burst(prepared[message[1]].run))


def _burst(run: Callable[[], Any]) -> list[float]:
    """The seconds of some calls after a first that warms the caches: for a second, at least two."""
    run()
    times = []
    while len(times) < 2 or (sum(times) < 1 and len(times) < 50):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times
