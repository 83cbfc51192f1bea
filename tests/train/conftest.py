"""Fixtures that the tests of training share."""

import os
import signal

import pytest

import train.command.train as train_command
from train.trainer.step import Trainer


@pytest.fixture(scope="session", autouse=True)
def no_late_checkpoints():
    """Writes checkpoints at evaluations only. On a busy machine, others would come by the clock."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.run.checkpoints.SECONDS_PER_SAVE", float("inf"))
        yield


@pytest.fixture
def unreported(monkeypatch):
    """Trains without the sample, the plot and the export at the end."""
    monkeypatch.setattr(train_command, "report", lambda *_: None)


@pytest.fixture
def interrupted_at(monkeypatch):
    """Sends this process a signal, once, before the call that does a given step."""

    def interrupt(step: int, number: signal.Signals) -> None:
        steps = Trainer.steps

        def send_and_step(self, state, batches, count):
            if int(state.step) <= step < int(state.step) + count:
                monkeypatch.setattr(Trainer, "steps", steps)
                os.kill(os.getpid(), number)
            return steps(self, state, batches, count)

        monkeypatch.setattr(Trainer, "steps", send_and_step)

    return interrupt
