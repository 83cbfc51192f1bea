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
from collections.abc import Callable
from types import ModuleType
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

    call: Callable[[], Any]
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
    module: ModuleType, arrays: list[np.ndarray], oracle: list[np.ndarray], *, backward: bool
) -> list[Measured]:
    """Time the contenders of a module, `JAX` and `TORCH`: factories of functions by name.

    The arrays are the functions' arguments and, last, the gradient of their output. A contender
    whose package is not installed is left out.
    """
    os.environ |= ENVIRONMENT
    context = multiprocessing.get_context("spawn")
    workers, compiled = {}, {}
    for framework in ("JAX", "TORCH"):
        workers[framework], theirs = context.Pipe()
        arguments = (theirs, module.__name__, framework, arrays, backward)
        context.Process(target=_work, args=arguments, daemon=True).start()
        for name in getattr(module, framework):
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
            workers[framework].send(name)
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


def _work(connection, module: str, framework: str, arrays, backward: bool) -> None:
    prepare = {"JAX": _prepare_jax, "TORCH": _prepare_torch}[framework]
    prepared: dict[str, Prepared] = {}
    for name, factory in getattr(importlib.import_module(module), framework).items():
        try:
            contender = prepared[name] = prepare(factory(), arrays, backward)
            connection.send((contender.compile_s, contender.memory, contender.result()))
        except Exception as error:
            connection.send(error)
    while (name := connection.recv()) is not None:
        connection.send(_burst(prepared[name].call))


def _prepare_jax(function, arrays: list[np.ndarray], backward: bool) -> Prepared:
    import jax

    def run(*arguments):
        if not backward:
            return [function(*arguments[:-1])]
        y, pullback = jax.vjp(function, *arguments[:-1])
        return [y, *pullback(arguments[-1])]

    arguments = [jax.device_put(x) for x in arrays]
    start = time.perf_counter()
    compiled = jax.jit(run).lower(*arguments).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    parts = ("argument", "output", "temp")
    return Prepared(
        call=lambda: jax.block_until_ready(compiled(*arguments)),
        result=lambda: [np.asarray(x) for x in compiled(*arguments)],
        compile_s=seconds,
        memory=sum(getattr(memory, f"{part}_size_in_bytes") for part in parts),
    )


def _prepare_torch(function, arrays: list[np.ndarray], backward: bool) -> Prepared:
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    *arguments, cotangent = (torch.from_numpy(x) for x in arrays)

    def run():
        if not backward:
            with torch.no_grad():
                return [function(*arguments)]
        leaves = [x.detach().requires_grad_() for x in arguments]
        y = function(*leaves)
        y.backward(cotangent)
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    return Prepared(run, lambda: [x.numpy() for x in run()], compile_s=None, memory=None)


def _burst(call: Callable[[], Any]) -> list[float]:
    """The seconds of some calls after a first that warms the caches: for 0.4 s, at least two."""
    call()
    times = []
    while len(times) < 2 or (sum(times) < 0.4 and len(times) < 50):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times
