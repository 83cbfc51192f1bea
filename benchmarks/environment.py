"""Finds the environment of a worker: its threads, their cores and its malloc."""

import contextlib
import ctypes
import dataclasses
import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from jax_models.allocator import ALLOCATE, SETTINGS, library_of, malloc_is_glibc

Allocator = Literal["default", "tuned"]
ALLOCATORS: tuple[Allocator, ...] = get_args(Allocator)
MALLOC_PREFIXES = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
THREAD_PREFIXES = ("OMP_", "GOMP_", "KMP_", "MKL_", "NPROC", "XLA_FLAGS")
"""Prefixes of the environment variables that change malloc, and of those that change threads."""
AT_ONCE, PAUSE = 0.75, 0.003
"""The quantile of the counts of active threads, and the seconds between two counts."""
BLOCK, TOUCHED = 2**32, 2**28
"""Bytes of the block that tests malloc, and of the part that is written.

By default, glibc returns a freed block of more than 2²⁵ bytes to the system, but a small block may
fit a gap between others. Only the part that is written takes memory."""


@dataclasses.dataclass(frozen=True)
class Environment:
    """The threads, cores, malloc and variables of a worker process."""

    threads: int
    """Number of threads that compute at the same time."""
    cores: int
    """Number of cores on which the most restricted of these threads may run."""
    malloc: str
    keeps_memory: bool
    """Whether freed memory remains with the process."""
    variables: dict[str, str]
    """The environment variables that change malloc or threads."""

    def faults(self, cores: int, allocator: Allocator) -> Iterator[str]:
        """The differences from the requested cores and allocator."""
        if self.threads < cores or self.cores != cores:
            yield (
                f"expected {cores} threads or more, each on {cores} cores, "
                f"got {self.threads} on {self.cores}"
            )
        if self.keeps_memory != (allocator == "tuned"):
            kept = "kept" if self.keeps_memory else "returned"
            yield f"expected the {allocator} allocator, got {self.malloc}: freed memory is {kept}"

    def __str__(self) -> str:
        variables = "".join(f", {name}={value}" for name, value in self.variables.items())
        kept = "kept" if self.keeps_memory else "returned"
        threads = f"{self.threads} threads, each on {self.cores} cores"
        return f"{threads}, {self.malloc}, freed memory is {kept}{variables}"


def without_malloc(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment, without those that change malloc."""
    return {name: x for name, x in environment.items() if not name.startswith(MALLOC_PREFIXES)}


def find_environment(compute: Callable[[np.ndarray], object], allocator: Allocator) -> Environment:
    """The environment of this process, in which `compute` makes a framework compute on an array."""
    threads, cores = working_threads(compute)
    glibc = " ".join(platform.libc_ver())
    malloc = glibc if malloc_is_glibc() else Path(library_of(ALLOCATE)).name
    settings = "".join(f", {name} {value}" for name, (_, value) in SETTINGS.items())
    names = (*MALLOC_PREFIXES, *THREAD_PREFIXES)
    return Environment(
        threads,
        cores,
        malloc + (settings if allocator == "tuned" else ""),
        keeps_memory(),
        {name: x for name, x in sorted(os.environ.items()) if name.startswith(names)},
    )


def working_threads(
    compute: Callable[[np.ndarray], object], *, seconds: float = 0.5, tries: int = 8
) -> tuple[int, int]:
    """Counts the threads that compute at the same time, and the cores of the most restricted one.

    Threads that take turns count as one. A thread that wakes up late may find no work left, so the
    count is repeated, up to `tries` times, until no thread is missing.
    """
    x, most = np.zeros(2**22, np.float32), (0, 0)
    compute(x)
    for _ in range(tries):
        with watched_threads() as seen:
            start = time.perf_counter()
            while time.perf_counter() - start < seconds:
                compute(x)
        at_once = int(np.quantile([len(threads) for threads in seen], AT_ONCE))
        active = Counter(thread for threads in seen for thread in threads)
        working = [thread for thread, _ in active.most_common(at_once)]
        cores = min((len(os.sched_getaffinity(thread)) for thread in working), default=0)
        most = max(most, (at_once, cores))
        if working and at_once >= cores:
            break
    return most


@contextlib.contextmanager
def watched_threads() -> Iterator[list[set[int]]]:
    """Collects the active threads every few milliseconds, except the thread that collects."""
    seen: list[set[int]] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(PAUSE):
            seen.append(active_threads() - {threading.get_native_id()})

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        done.set()
        watcher.join()


def active_threads() -> set[int]:
    """The threads of this process that run or wait for a core."""
    found = set()
    for path in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended in the meantime
            state, *_ = (path / "stat").read_text().rpartition(")")[2].split()
            if state == "R":
                found.add(int(path.name))
    return found


def keeps_memory() -> bool:
    """Whether a large block that is freed remains with this process."""
    c = ctypes.CDLL(None)
    c.malloc.restype, c.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    c.free.restype, c.free.argtypes = None, [ctypes.c_void_p]
    block = c.malloc(BLOCK)
    ctypes.memset(block, 1, TOUCHED)
    before = resident_bytes()
    c.free(block)
    return before - resident_bytes() < TOUCHED // 2


def resident_bytes() -> int:
    """The resident memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def processor() -> str:
    """The model of the processor, and its vector extensions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {name.strip(): x.strip() for name, _, x in (line.partition(":") for line in lines)}
    if "model name" not in fields:
        return platform.machine()
    numbers = f"family {fields.get('cpu family')}, model {fields.get('model')}"
    flags = fields.get("flags", "").split()
    vectors = [flag for flag in ("amx_tile", "avx512f", "avx2") if flag in flags]
    return f"{fields['model name']} ({', '.join([numbers, *vectors])})"
