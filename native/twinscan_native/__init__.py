"""Recurrent kernels for CPUs, as a shared library that `jax.ffi` calls."""

from pathlib import Path

INTERFACE = 3
"""The version of the arguments and results of the kernels. twinscan refuses another one."""


def path() -> Path:
    """Returns the path of the shared library.

    Raises:
        FileNotFoundError: this folder contains only the sources of the package.

    """
    for library in Path(__file__).parent.glob("libtwinscan_native.*"):
        return library
    raise FileNotFoundError("twinscan_native has no library here; install it: pip install ./native")
