"""Fixtures that all tests share."""

from pathlib import Path

import jax
import pytest

from train.__main__ import main


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Caches tokens in the folder of the tests, also for the processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def x64():
    """Enables float64."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def standard_promotion():
    """Promotes dtypes and ranks as in a user's program."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """The folder of a run with default options, trained to the end."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    main(["--out", str(folder), "--eval-batches", "20"])
    return folder
