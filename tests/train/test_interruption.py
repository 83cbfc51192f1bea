"""Runs that are stopped, killed, started twice or damaged resume and reach the same weights."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import chex
import filelock
import pytest
from flax import nnx

import train.command.train as train_command
from jax_models import RNNLanguageModelConfig
from train.data.text import ALL_WORK
from train.data.vocabulary import Characters
from train.run.checkpoints import Checkpoints
from train.run.config import TrainConfig
from train.run.folder import Run
from train.trainer.step import Trainer
from twinscan.command_line import CommandLineError, one_line_errors

pytestmark = pytest.mark.usefixtures("unreported")
STEPS = 30
ARGS = ["--num-steps", str(STEPS), "--eval-every", "10", "--eval-batches", "2"]


def command(folder: Path, *args: str) -> None:
    train_command.main(["--out", str(folder), *ARGS, *args])


def stopped(folder: Path, *args: str) -> int:
    """The exit code of a run, which must end with one line."""
    with pytest.raises(SystemExit) as stop, one_line_errors("prog"):
        command(folder, *args)
    return stop.value.code


def results(folder: Path) -> tuple[nnx.State, dict[int, float]]:
    """The weights and the logged losses, by their steps."""
    run = Run.open(folder)
    assert run.checkpoints.latest_step == STEPS
    losses = {line["step"]: line["loss"] for line in run.metrics("training")}
    return nnx.state(run.model(), nnx.Param), losses


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The results of a run without an interruption."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(train_command, "report", lambda *_: None)
        command(folder)
    return results(folder)


@pytest.mark.parametrize(("number", "step"), [(signal.SIGTERM, 0), (signal.SIGINT, 17)])
def test_a_signal_leaves_a_checkpoint_and_one_line(
    number, step, whole, interrupted_at, tmp_path, capsys
):
    folder = tmp_path / "run"
    before = signal.getsignal(number)
    interrupted_at(step, number)
    assert stopped(folder) == 128 + number
    latest = Run.open(folder).checkpoints.latest_step
    assert step < latest <= step + 10
    line = f"prog: stopped by {number.name}: the run is saved at step {latest} in {folder}\n"
    printed = capsys.readouterr()
    assert printed.err == line
    assert printed.out.startswith(f"no checkpoint yet: starting from scratch, in {folder}\n")
    assert signal.getsignal(number) is before
    command(folder)
    assert capsys.readouterr().out.startswith(f"resumed at step {latest}, in {folder}\n")
    chex.assert_trees_all_equal(results(folder), whole)


@pytest.mark.slow
def test_the_same_command_resumes_a_killed_run(whole, tmp_path):
    """Kills it once before its first checkpoint, and once when it has just written a later one."""
    folder = tmp_path / "run"
    args = [sys.executable, "-m", "train", "--out", str(folder), *ARGS]
    for awaited in ("config.json", "checkpoints/10"):
        with subprocess.Popen(args, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and not (folder / awaited).exists():
                time.sleep(0.01)
            process.kill()
        assert (folder / awaited).exists()
    command(folder)
    chex.assert_trees_all_equal(results(folder), whole)
    assert not [*(folder / "checkpoints").glob("*.partial")]


@pytest.mark.slow
def test_a_run_that_is_killed_early_resumes(whole, tmp_path, monkeypatch, capsys):
    """Its first checkpoint comes before the first evaluation, and later ones by the clock."""
    folder = tmp_path / "run"
    evaluate, steps, save = Trainer.evaluate, Trainer.steps, Checkpoints.save

    def kill(*_):
        raise SystemExit("killed")

    # Unlike a killed process, this one would write the last checkpoint to its end.
    monkeypatch.setattr(Checkpoints, "save", lambda c, *args: [save(c, *args), c.wait()])
    monkeypatch.setattr(Trainer, "evaluate", kill)
    with pytest.raises(SystemExit):
        command(folder)
    (folder / "checkpoints" / "3.partial").mkdir()
    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    monkeypatch.setattr("train.run.checkpoints.SECONDS_PER_SAVE", 0.0)
    monkeypatch.setattr("train.run.checkpoints.SAVING_SHARE", float("inf"))
    monkeypatch.setattr("train.run.loop.STEPS_PER_CALL", 2)
    calls = iter(range(3))
    monkeypatch.setattr(
        Trainer, "steps", lambda *args: steps(*args) if next(calls, None) is not None else kill()
    )
    with pytest.raises(SystemExit):
        command(folder)
    printed = capsys.readouterr()
    assert f"resumed at step 0, in {folder}\n" in printed.out
    assert re.search(r"checkpoints/3.partial: removed; .* of step 3\n", printed.err)
    monkeypatch.undo()
    monkeypatch.setattr(train_command, "report", lambda *_: None)
    command(folder)
    assert re.search(rf"^resumed at step [1-6], in {folder}\n", capsys.readouterr().out)
    chex.assert_trees_all_equal(results(folder), whole)


@pytest.mark.slow
def test_a_run_that_was_killed_before_it_began(whole, tmp_path):
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "lock").touch()
    (folder / "vocabulary.json").touch()
    command(folder)
    chex.assert_trees_all_equal(results(folder), whole)


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(whole, tmp_path, capsys):
    folder = tmp_path / "run"
    command(folder)
    [path] = (folder / "checkpoints" / str(STEPS) / "state" / "d").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    Run.open(folder).model()
    error = capsys.readouterr().err
    assert f"checkpoints/{STEPS}: the checkpoint is damaged: state/d/{path.name}: " in error
    assert error.endswith("; using the checkpoint of step 20 instead\n")
    command(folder)
    chex.assert_trees_all_equal(results(folder), whole)
    for path in (folder / "checkpoints").glob("*/manifest.json"):
        path.write_text("{}")
    with pytest.raises(CommandLineError, match=r"not a manifest; no other checkpoint is intact$"):
        command(folder)


def test_one_process_a_folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with (
        filelock.FileLock(folder / "lock"),
        pytest.raises(CommandLineError, match="another process is training in it"),
    ):
        command(folder)


@pytest.mark.slow
def test_a_text_that_changed_is_accepted_by_its_flag(tmp_path):
    text = tmp_path / "text"
    text.write_text("abcdefghij" * 30)
    folder = tmp_path / "run"
    constant = ["--text", str(text)]
    command(folder, *constant)
    text.write_text("jihgfedcba" * 30)
    with pytest.raises(CommandLineError, match="--allow-changed-text"):
        command(folder, *constant)
    command(folder, *constant, "--allow-changed-text")
    command(folder, *constant)
    text.write_text("abcdefghik" * 30)  # equally many characters, one of them different
    with pytest.raises(CommandLineError, match=r"^--tokenizer: .* has another vocabulary"):
        command(folder, *constant, "--allow-changed-text")


@pytest.fixture(scope="module")
def reported(tmp_path_factory) -> tuple[Path, str]:
    """The folder of a run with its report, and what it printed.

    Rich would replace :smile: in the path and break long lines.
    """
    folder = tmp_path_factory.mktemp("reported") / ":smile:" / ("long" * 30)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        command(folder)
    return folder, printed.getvalue()


@pytest.mark.slow
def test_a_finished_run_is_left_alone(reported, capsys):
    folder, printed = reported
    files = times(folder)
    assert f"torch weights: {folder}/twin.safetensors\n" in printed
    assert f"loss curve: {folder}/curve.png\n" in printed
    for args in (["--out", str(folder), *ARGS], ["--resume", str(folder)]):
        train_command.main(args)
        assert capsys.readouterr().out == f"{folder}: the run has finished its {STEPS} steps\n"
    assert times(folder) == files


def times(folder: Path) -> dict[Path, int]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {path: path.stat().st_mtime_ns for path in files}


def test_the_default_folder(tmp_path, monkeypatch):
    """It is that of a run that never began or is unfinished with the same config, or a new one."""
    first, second = tmp_path / "all-work", tmp_path / "all-work-2"
    config, another = TrainConfig(), TrainConfig(seed=7)
    first.mkdir()
    (first / "lock").touch()
    assert train_command.default_folder(first, config) == first
    Run.create(first, config, Characters.of(ALL_WORK), "")
    assert train_command.default_folder(first, config) == first
    assert train_command.default_folder(first, another) == second
    monkeypatch.setattr(Run, "is_finished", True)
    assert train_command.default_folder(first, config) == second


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "number", "seconds"),
    [("train", signal.SIGINT, 0.2), ("twinscan", signal.SIGINT, 0.8), ("train", signal.SIGTERM, 2)],
)
def test_a_signal_before_the_first_step_is_one_line(module, number, seconds, tmp_path):
    """The signal comes while it imports, reads or compiles."""
    args = [*([] if module == "train" else ["train"]), "--out", str(tmp_path / "run")]
    process = subprocess.Popen(
        [sys.executable, "-m", module, *args, "--num-steps", "1000000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(number)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number, error
    name = "python -m train" if module == "train" else "twinscan"
    assert re.fullmatch(f"{name}( train)?: (interrupted|stopped by {number.name}: .*)\n", error)


def test_a_config_that_was_changed_by_hand_is_refused_by_name(tmp_path):
    run = Run.create(tmp_path / "run", TrainConfig(), Characters.of(ALL_WORK), "")
    path = run.folder / "config.json"
    path.write_text(path.read_text().replace('"schedule": "constant"', '"schedule": "step"'))
    with pytest.raises(CommandLineError, match=r"config\.json is damaged: .*schedule:.*[^\n]+$"):
        train_command.main(["--resume", str(run.folder)])


def test_a_config_without_a_digest_may_be_that_of_an_early_version(tmp_path):
    run = Run.create(tmp_path / "run", TrainConfig(), Characters.of(ALL_WORK), "")
    path = run.folder / "config.json"
    fields = json.loads(path.read_text())
    del fields["digest"]
    path.write_text(json.dumps(fields))
    with pytest.raises(CommandLineError, match="no digest, or an early version of twinscan wrote"):
        Run.open(run.folder)


@pytest.mark.parametrize("name", ["config.json", "vocabulary.json"])
def test_a_flipped_bit_of_a_runs_files_is_noticed(name, tmp_path):
    """A flip may keep the meaning, such as that of a letter's case in a JSON escape."""
    config = TrainConfig(model=RNNLanguageModelConfig(vocab_size=3))
    run = Run.create(tmp_path / "run", config, Characters.of("aé\n"), "digest")
    path = run.folder / name
    written = path.read_bytes()
    for bit in range(0, 8 * len(written), 29):
        content = bytearray(written)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        try:
            found = Run.open(run.folder)
        except CommandLineError as error:
            assert re.search(rf"{name} is damaged: [^\n]+$", str(error)), error  # noqa: PT017
        else:
            assert json.loads(content) == json.loads(written), bit
            assert (found.config, found.vocabulary) == (run.config, run.vocabulary)


@pytest.mark.slow
def test_a_killed_report_is_made_again(reported, tmp_path, monkeypatch):
    """The run may have been extended, and its folder may have the weights of the shorter run."""
    monkeypatch.undo()
    folder = shutil.copytree(reported[0], tmp_path / "run")
    first = (folder / "twin.safetensors").read_bytes()
    longer = ["--resume", str(folder), "--num-steps", str(STEPS + 10)]
    with monkeypatch.context() as patched:
        patched.setattr(train_command, "report", lambda *_: None)
        train_command.main(longer)
    assert (folder / "twin.safetensors").read_bytes() == first
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        patched.setattr(Run, "draw_curve", lambda run: run.folder)
        with pytest.raises(KeyboardInterrupt):
            train_command.main(longer)
    assert (folder / "twin.safetensors").read_bytes() == first
    train_command.main(longer)
    assert (folder / "twin.safetensors").read_bytes() != first
    assert Run.open(folder).is_finished


def test_a_signal_in_the_last_save_is_not_lost(tmp_path, monkeypatch, capsys):
    """The run is then complete, and the same command writes its report."""
    close = Checkpoints.close
    monkeypatch.setattr(
        Checkpoints, "close", lambda c: [os.kill(os.getpid(), signal.SIGTERM), close(c)][1]
    )
    assert stopped(tmp_path / "run") == 128 + signal.SIGTERM
    assert f"stopped by SIGTERM: the run is saved at step {STEPS} in" in capsys.readouterr().err
