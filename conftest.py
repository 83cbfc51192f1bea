"""Settings for all tests: dtypes and ranks are not promoted silently, and XLA compiles quickly.

XLA compiles without optimizing, which takes a sixth of the time. With `--optimized`, it optimizes,
and only the tests marked `optimized` run. Compiled programs are cached for the next run and for the
processes that tests start, in the folder `JAX_COMPILATION_CACHE_DIR` or in this clone.
"""

import ctypes
import gc
import importlib.metadata
import os
from pathlib import Path

import pytest

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent / ".jax_cache"))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")

PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
"""Virtual devices wait for each other this long, in place of 40 s, before XLA ends the process.

On a machine with two busy cores one of eight devices may well be 40 s late."""

QUICK = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if importlib.metadata.version("jaxlib") < "0.11":  # later versions have no such flag
    QUICK += ["--xla_cpu_use_fusion_emitters=false"]


MAPS = Path("/proc/self/maps")
MOST_MAPS = 30_000
"""The number of memory mappings above which compiled programs are dropped.

Linux allows a process 65,530 mappings and ends it if it needs more. Each compiled program takes
some of them."""
MOST_PAGES = 2**19
"""The number of pages of resident memory, 2 GiB in all, above which compiled programs are dropped.

Otherwise, the processes of the whole suite would take over 20 GiB together."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option `--optimized`."""
    parser.addoption(
        "--optimized",
        action="store_true",
        help="run the tests marked `optimized`, compiled as for users, in the place of all others",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Sets XLA's flags, before JAX starts it."""
    given = os.environ.get("XLA_FLAGS", "").split()
    flags = [PATIENT] if config.option.optimized else [PATIENT, *QUICK]
    os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys([*given, *flags]))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `--optimized`, leaves out the files without such a test, which import much."""
    is_test = collection_path.name.startswith("test_")
    if config.option.optimized and is_test and collection_path.is_file():
        return True if "mark.optimized" not in collection_path.read_text() else None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selects the tests marked `optimized` with `--optimized`, and the others without it."""

    def is_chosen(item: pytest.Item) -> bool:
        return config.option.optimized == (item.get_closest_marker("optimized") is not None)

    config.hook.pytest_deselected(items=[item for item in items if not is_chosen(item)])
    items[:] = filter(is_chosen, items)


def pytest_collection_finish() -> None:
    """Runs the garbage collector less often.

    By default, it takes about 8% of the time, because it looks at the many objects of JAX's traces
    again and again. Few of them are garbage.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def drop_programs() -> None:
    """Drops compiled programs if they take many memory mappings or much memory."""
    import jax  # only after `pytest_configure` has set XLA's flags

    if not MAPS.exists():  # the system is not Linux
        return
    pages = int(MAPS.with_name("statm").read_text().split()[1])
    if MAPS.read_bytes().count(b"\n") > MOST_MAPS or pages > MOST_PAGES:
        jax.clear_caches()
        gc.collect()
        if hasattr(c := ctypes.CDLL(None), "malloc_trim"):  # glibc keeps freed memory otherwise
            c.malloc_trim(0)


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Drops the compiled programs of a module if they are many."""
    yield
    drop_programs()
