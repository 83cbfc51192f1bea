"""Two processes on one machine train the same run as one process with as many devices."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import train.command.train as train_command
from train.run.folder import Run

pytestmark = pytest.mark.xdist_group("hosts")  # so that they share the fixture
SECONDS = 180
TRAIN = """
import runpy
from functools import partial
import jax
jax.distributed.initialize = partial(jax.distributed.initialize, heartbeat_timeout_seconds=15)
runpy.run_module("train", run_name="__main__", alter_sys=True)
"""
"""`python -m train`, which notices after 15 seconds that a process is gone, and not after 100."""
ARGS = "--num-steps 40 --eval-every 10 --eval-batches 2 --model.hidden-features 8 --log-every 40"


def start(folder: Path, *config: str) -> list:
    """Starts both processes of a run, with one device each. Only the last one gets `config`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-c", TRAIN, "--out", str(folder), *ARGS.split()]
    command += ["--mesh.fully-sharded"]
    command += ["--hosts.coordinator", address, "--hosts.num-processes", "2", "--hosts.process-id"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    options = (["0"], ["1", *config])
    return [subprocess.Popen([*command, *own], env=env, **pipes) for own in options]


def ended(processes: list) -> list[tuple[int, str, str]]:
    """The exit codes and outputs of the processes. The test fails if one hangs."""
    try:
        outputs = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, *output) for p, output in zip(processes, outputs, strict=True)]


def wait_until(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def val_losses(folder: Path) -> list[float]:
    return [line["val"] for line in Run.open(folder).metrics()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The run of two processes without an interruption."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    (first, second) = ended(start(folder))
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "val loss" in first[1]
    assert "val loss" not in second[1]
    assert (folder / "twin.safetensors").exists()
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("unreported")
def test_two_processes_make_the_run_of_one(whole, tmp_path):
    train_command.main(["--out", str(tmp_path / "run"), *ARGS.split()])
    np.testing.assert_allclose(val_losses(whole), val_losses(tmp_path / "run"), rtol=1e-4)


@pytest.mark.slow
def test_a_signal_to_one_process_ends_both_and_both_are_resumed(whole, tmp_path):
    """Both save the run before they end, unless the process is killed."""
    folder = tmp_path / "run"
    processes = start(folder)
    wait_until((folder / "checkpoints" / "0" / "manifest.json").exists)
    processes[1].send_signal(signal.SIGTERM)
    for code, _, error in ended(processes):
        assert code == 128 + signal.SIGTERM, error
        assert re.search(r"stopped by SIGTERM: the run is saved at step \d+ in", error)
    processes = start(folder)
    wait_until(lambda: (folder / "metrics.jsonl").read_text().count('"start"') == 2)
    processes[1].send_signal(signal.SIGKILL)
    _, killed = ended(processes)
    assert killed[0] == -signal.SIGKILL
    for code, _, error in ended(start(folder)):
        assert code == 0, error
    assert val_losses(folder) == val_losses(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "first", "last"),
    [
        (("--seed", "7"), *2 * ["processes 0 and 1 differ in their config"]),
        (
            ("--text", "/no.txt"),
            "--hosts: process 1 has stopped; see its output",
            "/no.txt: No such file",
        ),
    ],
)
def test_processes_that_differ_are_refused(config, first, last, tmp_path):
    began = time.monotonic()
    ends = ended(start(tmp_path / "run", *config))
    for (code, _, error), message in zip(ends, (first, last), strict=True):
        assert code == 2, error
        assert message in error
        assert error.count("\n") == 1
    assert time.monotonic() - began < 60  # JAX's timeouts are much longer
    assert not (tmp_path / "run" / "config.json").exists()
