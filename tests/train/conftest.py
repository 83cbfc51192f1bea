"""What the tests of training share."""

import pytest

import train.__main__ as train_command


@pytest.fixture
def unreported(monkeypatch):
    """Training without the sample, the plot and the export at its end."""
    monkeypatch.setattr(train_command, "report", lambda *_: None)
