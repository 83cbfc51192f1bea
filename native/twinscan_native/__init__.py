"""Kernels for CPUs, as a shared library that `jax.ffi` calls."""

import ctypes
import os
from functools import cache
from pathlib import Path


def path() -> Path:
    """Returns the path of the shared library.

    Raises:
        FileNotFoundError: this folder contains only the sources of the package.

    """
    for file in Path(__file__).parent.glob("libtwinscan_native.*"):
        return file
    raise FileNotFoundError("twinscan_native has no library here; install it: pip install ./native")


@cache
def library() -> ctypes.CDLL:
    """Loads the shared library.

    Raises:
        OSError: it cannot be loaded.

    """
    return ctypes.CDLL(str(path()))


def num_threads() -> int:
    """Returns how many threads a kernel may use.

    Unless `set_num_threads` was called, this is the number in the environment variable
    `TWINSCAN_NATIVE_THREADS` or, without it, the number of cores that the process may use.
    """
    return library().twinscan_threads()


def set_num_threads(count: int) -> None:
    """Sets how many threads a kernel may use, from the next call on.

    `set_num_threads(1)` leaves all other cores to other work, for example if several processes
    share a machine. The number decides how the work is divided, and so in which order sums are
    added: results with different numbers of threads may differ by rounding.

        import twinscan_native
        twinscan_native.set_num_threads(1)

    Raises:
        ValueError: `count` is not a positive integer.

    """
    library().twinscan_set_threads(_checked("count", count))


def _checked(name: str, count: object) -> int:
    if str(count).isdecimal() and 0 < (threads := int(str(count))) < 2**31:
        return threads
    raise ValueError(f"{name}: expected a positive number of threads, got {count!r}")


if (_given := os.environ.get("TWINSCAN_NATIVE_THREADS")) is not None:
    _checked("TWINSCAN_NATIVE_THREADS", _given)
