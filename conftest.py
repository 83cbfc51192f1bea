"""How every test runs: dtypes and ranks are never promoted in silence, and XLA compiles quickly.

XLA compiles without optimising, in a sixth of the time, except with `--optimized`, which runs only
the tests marked `optimized`. What is compiled is kept for the next run and for the processes that
tests start.
"""

import gc
import importlib.metadata
import os
from pathlib import Path

import pytest

os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(__file__).parent / ".jax_cache")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")

QUICK = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if importlib.metadata.version("jaxlib") < "0.11":  # later versions have no such flag
    QUICK += ["--xla_cpu_use_fusion_emitters=false"]


MAPS = Path("/proc/self/maps")
MOST_MAPS = 30_000
"""Linux allows a process 65,530 mappings; each compiled program takes some, and one too many ends
the process."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--optimized`."""
    parser.addoption(
        "--optimized",
        action="store_true",
        help="run the tests marked `optimized`, compiled as for users, in the place of all others",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Tell XLA, before JAX starts it."""
    given = os.environ.get("XLA_FLAGS", "").split()
    if not config.option.optimized:
        os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys([*given, *QUICK]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that `--optimized` excludes, or those that it asks for."""

    def is_chosen(item: pytest.Item) -> bool:
        return config.option.optimized == (item.get_closest_marker("optimized") is not None)

    config.hook.pytest_deselected(items=[item for item in items if not is_chosen(item)])
    items[:] = filter(is_chosen, items)


@pytest.fixture(scope="module", autouse=True)
def few_mappings():
    """Drop what is compiled when it takes many mappings."""
    yield
    import jax  # not before `pytest_configure` has told XLA

    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()
