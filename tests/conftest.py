"""What the tests share."""

from pathlib import Path

import jax
import pytest

from train.__main__ import main


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """XLA does not optimise, a third of the time, but for tests marked `optimized` and parity's."""
    unoptimized = item.get_closest_marker("optimized") is None and item.path.parent.name != "parity"
    jax.config.update("jax_disable_most_optimizations", unoptimized)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    """The next may be a parity test."""
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def x64():
    """float64 is float64."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """The folder of the seed's experiment, run to its end."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    main(["--out", str(folder), "--eval-batches", "20"])
    return folder
