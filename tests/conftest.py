"""What the tests share."""

from pathlib import Path

import jax
import pytest

from train.__main__ import main


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
