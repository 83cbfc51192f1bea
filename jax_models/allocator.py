"""Settings that make malloc keep the memory that a process frees."""

__all__ = ["tune_allocator"]

import ctypes
import sys

SETTINGS = {
    "M_MMAP_MAX": (-4, 0),  # large blocks come from the heap, too
    "M_TRIM_THRESHOLD": (-1, -1),  # the heap never shrinks
    "M_ARENA_MAX": (-8, 1),  # all threads share the heap
}
"""The parameters of glibc's `mallopt`: the number of each and the value it is set to."""

ALLOCATE = "posix_memalign"
"""A function that every malloc replaces. In some executables, such as Debian's Python, the address
of `malloc` itself is one of the executable, whatever malloc runs."""


def tune_allocator() -> bool:
    """Let this process keep the memory that it frees, which makes the next allocation cheap.

    ```python
    import jax_models
    jax_models.tune_allocator()  # before the first array
    ```

    By default glibc's malloc returns large blocks to the system, so an array of more than 32 MiB
    always consists of fresh pages, and on a CPU these can cost more than the operation that fills
    them. This function calls `mallopt` three times to keep such blocks. The environment variables
    `MALLOC_MMAP_MAX_=0`, `MALLOC_TRIM_THRESHOLD_=1099511627776` and `MALLOC_ARENA_MAX=1` do the
    same. docs/benchmarks.md has the figures; `man 3 mallopt` describes the parameters.

    The price is memory: the process never shrinks below its peak, and the peak is higher, because
    freed blocks leave gaps that are too small for some new arrays. On 22 November 2026 a training
    step of the preset `hawk` took 376 ms instead of 529 ms, and used 1.8 times the memory. Arrays
    on a GPU or a TPU are not affected.

    Call it before JAX makes its first array, because existing blocks stay where they are.
    `import jax_models` does not call it. `python -m train` does.

    Returns:
        Whether it took effect. On macOS, on Windows, with musl, and where another malloc is
        preloaded, it does nothing and returns False.

    """
    return malloc_is_glibc() and all(
        ctypes.CDLL(None).mallopt(*setting) for setting in SETTINGS.values()
    )


def malloc_is_glibc() -> bool:
    """Whether this process allocates with glibc's malloc."""
    if not sys.platform.startswith("linux"):
        return False
    process = ctypes.CDLL(None)
    return hasattr(process, "gnu_get_libc_version") and (
        library_of(ALLOCATE) == library_of("gnu_get_libc_version")
    )


class _Symbol(ctypes.Structure):
    """`Dl_info` of dlfcn.h."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def library_of(function: str) -> str:
    """The shared library from which this process gets a C function."""
    process, found = ctypes.CDLL(None), _Symbol()
    process.dladdr(ctypes.cast(process[function], ctypes.c_void_p), ctypes.byref(found))
    return found.file.decode()
