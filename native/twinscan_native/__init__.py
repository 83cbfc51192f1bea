"""Recurrent kernels for CPUs, as a shared library that `jax.ffi` calls."""

from pathlib import Path


def path() -> Path:
    """Returns the path of the shared library."""
    return next(Path(__file__).parent.glob("libtwinscan_native.*"))
