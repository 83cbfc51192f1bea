"""Runs that are stopped, killed, started twice or found damaged go on to the same weights."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import chex
import filelock
import pytest
from flax import nnx

import train.__main__ as train_command
from jax_models import RNNLanguageModelConfig
from train.checkpoints import Checkpoints
from train.config import TrainConfig
from train.run import Run
from train.text import ALL_WORK
from train.vocabulary import Characters
from twinscan.command_line import CommandLineError, one_line_errors

pytestmark = pytest.mark.usefixtures("unreported")
STEPS = 30
ARGS = ["--num-steps", str(STEPS), "--eval-every", "10", "--eval-batches", "2"]


def command(folder: Path, *args: str) -> None:
    train_command.main(["--out", str(folder), *ARGS, *args])


def params(folder: Path) -> nnx.State:
    run = Run.open(folder)
    assert run.checkpoints.latest_step == STEPS
    return nnx.state(run.model(), nnx.Param)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> nnx.State:
    """The weights of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(train_command, "report", lambda *_: None)
        command(folder)
    return params(folder)


@pytest.mark.parametrize(
    ("number", "step"),
    [
        (signal.SIGTERM, 0),
        (signal.SIGINT, 17),
        pytest.param(signal.SIGTERM, 9, marks=pytest.mark.slow),
    ],
)
def test_a_signal_leaves_a_checkpoint_and_one_line(
    number, step, whole, interrupted_at, tmp_path, capsys
):
    folder = tmp_path / "run"
    before = signal.getsignal(number)
    interrupted_at(step, number)
    with pytest.raises(SystemExit) as stop, one_line_errors("prog"):
        command(folder)
    assert stop.value.code == 128 + number
    error = capsys.readouterr().err
    latest = Run.open(folder).checkpoints.latest_step
    assert (
        error == f"prog: stopped by {number.name}: the run is saved at step {latest} in {folder}\n"
    )
    assert latest is not None
    assert step < latest <= step + 10
    assert signal.getsignal(number) is before
    command(folder)
    chex.assert_trees_all_equal(params(folder), whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_killed_run_goes_on_by_the_same_command(seed, whole, tmp_path):
    """Killed at another moment each time, from before its config to a save, until it is done."""
    folder = tmp_path / "run"
    args = [sys.executable, "-m", "train", "--out", str(folder), *ARGS]
    delays = iter([4.5 + 0.45 * seed + 0.15 * i for i in range(5)])
    for _ in range(6):
        try:
            subprocess.run(args, check=True, timeout=next(delays, 300), capture_output=True)
            break
        except subprocess.TimeoutExpired:  # subprocess.run kills it with SIGKILL
            pass
    chex.assert_trees_all_equal(params(folder), whole)
    assert not [*(folder / "checkpoints").glob("*.partial")]


@pytest.mark.slow
@pytest.mark.parametrize("kept", [["lock"], ["lock", "checkpoints"], ["vocabulary.json"]])
def test_a_run_that_was_killed_before_it_began(kept, whole, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in kept:
        (folder / name).mkdir() if name == "checkpoints" else (folder / name).write_text("")
    command(folder)
    chex.assert_trees_all_equal(params(folder), whole)


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(whole, tmp_path, capsys):
    folder = tmp_path / "run"
    command(folder)
    [path] = (folder / "checkpoints" / str(STEPS) / "state" / "d").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    Run.open(folder).model()
    error = capsys.readouterr().err
    assert f"checkpoints/{STEPS}: the checkpoint is damaged: state/d/{path.name}: " in error
    assert error.endswith("; resuming from step 20 instead\n")
    command(folder)
    chex.assert_trees_all_equal(params(folder), whole)
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


@pytest.mark.slow
def test_a_finished_run_is_left_alone(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    monkeypatch.undo()
    command(folder)
    files = times(folder)
    capsys.readouterr()
    for args in (["--out", str(folder), *ARGS], ["--resume", str(folder)]):
        train_command.main(args)
        assert capsys.readouterr().out == f"{folder}: the run has finished its {STEPS} steps\n"
    assert times(folder) == files


def times(folder: Path) -> dict[Path, int]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {path: path.stat().st_mtime_ns for path in files}


@pytest.mark.slow
def test_the_default_folder(tmp_path, monkeypatch, interrupted_at):
    """The unfinished run of the same options, or a new one."""
    monkeypatch.chdir(tmp_path)
    train_command.main(ARGS)
    train_command.main([*ARGS, "--seed", "7"])
    interrupted_at(17, signal.SIGTERM)
    with pytest.raises(SystemExit), one_line_errors("prog"):
        train_command.main([*ARGS, "--seed", "8"])
    train_command.main([*ARGS, "--seed", "8"])
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == ["all-work", "all-work-2", "all-work-3"]
    assert Run.open(tmp_path / "runs" / "all-work-3").checkpoints.latest_step == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.2, 0.8, 1.5])
@pytest.mark.parametrize(
    ("module", "number"),
    [("train", signal.SIGINT), ("twinscan", signal.SIGINT), ("train", signal.SIGTERM)],
)
def test_a_signal_before_the_first_step_is_one_line(module, number, seconds, tmp_path):
    """While it imports, reads, or compiles."""
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


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ('"schedule": "constant"', '"schedule": "step"', "schedule:"),
        ('"seed": 2001', '"sead": 2001', "sead"),
        ('"optimizer": {', '"optimizer": [{', ""),
    ],
)
def test_a_config_that_was_changed_by_hand_is_refused_by_name(before, after, fault, tmp_path):
    run = Run.create(tmp_path / "run", TrainConfig(), Characters.of(ALL_WORK), "")
    path = run.folder / "config.json"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    with pytest.raises(CommandLineError, match=rf"config\.json is damaged: .*{fault}") as error:
        train_command.main(["--resume", str(run.folder)])
    assert "\n" not in str(error.value)


FILES = ("config.json", "vocabulary.json")


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_of_a_runs_files_is_noticed(name, tmp_path):
    """Or it says the same still: `\u00e9` as `\u00e9`."""
    config = TrainConfig(model=RNNLanguageModelConfig(vocab_size=3))
    run = Run.create(tmp_path / "run", config, Characters.of("aé\n"), "digest")
    path = run.folder / name
    written = path.read_bytes()
    for bit in range(0, 8 * len(written), 11):
        content = bytearray(written)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        fault, found = "", None
        try:
            found = Run.open(run.folder)
        except CommandLineError as error:
            fault = str(error)
        if found is None:
            assert re.search(rf"{name} is damaged: [^\n]+$", fault), fault
        else:
            assert json.loads(content) == json.loads(written), bit
            assert (found.config, found.vocabulary) == (run.config, run.vocabulary)


@pytest.mark.slow
def test_a_killed_report_is_made_again(tmp_path, monkeypatch):
    """Also of a run that was longer than before, whose first end left its weights."""
    monkeypatch.undo()
    folder = tmp_path / "run"
    command(folder)
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


def test_the_losses_of_a_line_that_a_signal_cut_are_kept(interrupted_at, tmp_path):
    lines = ["--log-every", str(STEPS), "--eval-every", str(STEPS)]
    command(tmp_path / "whole", *lines)
    interrupted_at(13, signal.SIGTERM)
    with pytest.raises(SystemExit), one_line_errors("prog"):
        command(tmp_path / "cut", *lines)
    assert not Run.open(tmp_path / "cut").metrics("training")
    command(tmp_path / "cut", *lines)
    whole, cut = (
        {line["step"]: line["loss"] for line in Run.open(tmp_path / name).metrics("training")}
        for name in ("whole", "cut")
    )
    assert whole == cut


@pytest.mark.parametrize("moment", ["the last step", "the last save"])
def test_a_signal_at_the_end_is_not_lost(moment, interrupted_at, tmp_path, monkeypatch, capsys):
    """The run is whole then, and the same command makes its report."""
    if moment == "the last step":
        interrupted_at(STEPS - 1, signal.SIGTERM)
    else:
        close = Checkpoints.close
        monkeypatch.setattr(
            Checkpoints, "close", lambda c: [os.kill(os.getpid(), signal.SIGTERM), close(c)][1]
        )
    with pytest.raises(SystemExit) as stop, one_line_errors("prog"):
        command(tmp_path / "run")
    assert stop.value.code == 143
    assert f"stopped by SIGTERM: the run is saved at step {STEPS} in" in capsys.readouterr().err
    assert Run.open(tmp_path / "run").checkpoints.latest_step == STEPS


@pytest.mark.slow
def test_a_path_is_shown_as_it_is(tmp_path, monkeypatch, capsys):
    """Where rich would draw a picture, or break it."""
    monkeypatch.undo()
    folder = tmp_path / ":smile:" / ("long" * 30)
    command(folder)
    shown = capsys.readouterr().out
    assert f"torch weights: {folder}/twin.safetensors\n" in shown
    assert f"loss curve: {folder}/curve.png\n" in shown


def test_a_text_of_as_many_other_characters_is_refused(tmp_path):
    text, folder = tmp_path / "text", tmp_path / "run"
    text.write_text("abcdefghij" * 30)
    command(folder, "--text", str(text))
    text.write_text("abcdefghik" * 30)
    with pytest.raises(CommandLineError, match=r"^--tokenizer: .* has another vocabulary"):
        command(folder, "--text", str(text), "--allow-changed-text")


def test_a_default_folder_whose_run_never_began_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "all-work").mkdir(parents=True)
    (tmp_path / "runs" / "all-work" / "lock").touch()
    train_command.main(ARGS)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["all-work"]
