"""What the tests of the commands share."""

from pathlib import Path

import pytest

from train.__main__ import main


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """The folder of the seed's experiment, run to its end."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    main(["--out", str(folder), "--eval-batches", "20"])
    return folder
