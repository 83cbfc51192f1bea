"""The output of a run, and its response to steps whose loss or gradient is not finite."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

import train.command.train as train_command
import train.trainer.step
from train.command import convert, evaluate, export, generate
from train.data.text import ALL_WORK
from train.data.vocabulary import Characters
from train.data.windows import Batches, split
from train.run.config import TrainConfig
from train.run.curve import draw_curve
from train.run.folder import Run, build_trainer
from train.run.monitor import peak_flops
from train.trainer.step import Trainer
from twinscan.command_line import CommandLineError, one_line_errors
from twinscan.heartbeat import doing, heartbeat, line_printed, written_by

pytestmark = pytest.mark.usefixtures("unreported")
ARGS = ["--num-steps", "30", "--eval-every", "10", "--eval-batches", "2", "--log-every", "6"]
WINDOWS = split(Characters.of(ALL_WORK).encode(ALL_WORK), 8)
PARTS = {name: len(part.rows) * part.window for name, part in WINDOWS.items()}
TRAINING = WINDOWS["train"]
BATCHES = Batches(TRAINING, batch_size=4, seed=2001)


def command(folder: Path, *args: str) -> Run:
    train_command.main(["--out", str(folder), *ARGS, *args])
    return Run.open(folder)


def lines(folder: Path) -> list[dict]:
    """The lines of the metrics, which must be strict JSON."""

    def refuse(constant):
        raise AssertionError(constant)

    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


@pytest.fixture
def fails_at(monkeypatch):
    """Makes the gradients of some steps NaN, without changing their losses."""
    token_losses = train.trainer.step.token_losses

    def fail(*steps: int) -> None:
        bad = np.stack([BATCHES[step] for step in steps])

        def failing(model, inputs, targets, **options):
            losses = token_losses(model, inputs, targets)
            if inputs.shape != bad[0, :, :-1].shape:
                return losses
            is_bad = (inputs[None] == bad[..., :-1]).all((1, 2)).any()
            inner = jnp.where(is_bad, 0 * losses, 1.0)
            return losses + jnp.sqrt(inner) - jnp.where(is_bad, 0.0, 1.0)

        monkeypatch.setattr(train.trainer.step, "token_losses", failing)

    return fail


@pytest.mark.parametrize("number", [jnp.nan, jnp.inf])
def test_a_step_that_is_not_finite_changes_the_steps_number_only(number, monkeypatch):
    token_losses = train.trainer.step.token_losses

    def failing(model, inputs, targets, **options):
        return token_losses(model, inputs, targets) + jnp.where(inputs[0, 0] == 7, number, 0.0)

    monkeypatch.setattr(train.trainer.step, "token_losses", failing)
    trainer = build_trainer(TrainConfig())
    good, bad, *_ = tokens = np.random.default_rng(0).integers(0, 7, (4, 4, 9))
    bad[0, 0] = 7
    found, measures = trainer.steps(trainer.initial_state(), trainer.put(tokens), 3)
    expected, _ = trainer.steps(
        trainer.initial_state(), trainer.put(np.stack([good, *tokens[2:], good])), 2
    )
    assert int(found.step) == 3
    np.testing.assert_array_equal(np.isfinite(measures.loss), [True, False, True, True])
    chex.assert_trees_all_equal(found[1:], expected[1:])
    assert trainer.is_finite(found)


@pytest.mark.slow
def test_too_many_skipped_steps_in_a_row_end_the_run(fails_at, tmp_path, capsys):
    """A step that is applied restarts the count in a row. A restart of the process does not."""
    fails_at(6, 8, 9, 10)
    folder = tmp_path / "run"
    run = command(folder, "--num-steps", "10", "--max-skipped", "3")
    skipped = run.metrics("skipped")
    assert [line["step"] for line in skipped] == [6, 8, 9]
    for line in skipped:
        assert line.keys() == {"step", "skipped", "rows"}
        windows = [TRAINING.tokens[start : start + 9] for start in line["rows"]]
        np.testing.assert_array_equal(windows, BATCHES[line["step"]])
    printed = capsys.readouterr().out
    assert "      6  not applied: its loss is 3." in printed
    assert "gradient's norm nan (2 in a row)" in printed
    with pytest.raises(SystemExit) as stop, one_line_errors("prog"):
        train_command.main(["--resume", str(folder), "--num-steps", "30"])
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith(
        "prog: error: step 10: the losses or gradients of 3 steps in a row are not finite; "
        f"the last finite checkpoint is of step 10, in {folder} "
    )
    assert error.count("\n") == 1


def test_the_lines_of_a_run(tmp_path, monkeypatch, capsys):
    """TensorBoard gets the same numbers, and the curve is redrawn meanwhile."""
    monkeypatch.setattr("train.run.monitor.FIRST_DRAWING", 0.0)
    drawn = []
    monkeypatch.setattr(Run, "draw_curve", lambda run: drawn.append(run.metrics()[-1]["step"]))
    run = command(tmp_path / "run", "--optimizer.schedule", "cosine", "--tensorboard")
    assert drawn[0] == 0
    start, *_ = all_lines = lines(run.folder)
    assert start == {"start": 0, "device": "cpu", "devices": 1, "parameters": 1380}
    assert [line for line in all_lines if "compile_seconds" in line]
    training = run.metrics("training")
    # A short run has at least ten lines, although --log-every 6 asks for fewer.
    assert [line["step"] for line in training] == [3, 6, 9, 10, 12, 15, 18, 20, 21, 24, 27, 30]
    assert [line["step"] for line in run.metrics()] == [0, 10, 20, 30]
    trainer = build_trainer(run.config)
    state, losses, norms = trainer.initial_state(), [], []
    for step in range(30):
        state, measures = trainer.step(state, trainer.put(BATCHES[step]))
        losses.append(float(measures.loss))
        norms.append(float(measures.gradient_norm))
    since = 0
    for line in training:
        step = line["step"]
        np.testing.assert_allclose(line["loss"], np.mean(losses[since:step]), rtol=1e-6)
        np.testing.assert_allclose(line["gradient_norm"], norms[step - 1], rtol=1e-5)
        rate = 1e-3 * (1 + np.cos(np.pi * (step - 1) / 30)) / 2
        np.testing.assert_allclose(line["learning_rate"], rate, rtol=1e-5)
        assert line["tokens_per_second"] > 0
        assert "mfu" not in line
        since = step
    assert training[-1]["seconds_left"] == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        f"no checkpoint yet: starting from scratch, in {run.folder}\n1 × cpu, 1,380 parameters\n"
    )
    assert re.search(r"^compiling the training step\ncompiled in \d", printed, re.MULTILINE)
    scalars = tensorboard_scalars(run.folder)
    for line in run.metrics() + training:
        for name in line.keys() - {"step"}:
            np.testing.assert_allclose(scalars.pop((line["step"], name)), line[name], rtol=1e-6)
    assert not scalars


@pytest.mark.slow
def test_the_loss_that_balances_experts_is_added_and_logged(tmp_path):
    """The losses of evaluations are those of the tokens alone."""
    sizes = ["num-layers=1", "features=16", "num-heads=2", "num-experts=4", "mlp-features=8"]
    sizes += ["mamba-heads=2", "mamba-head-features=16", "state-features=4", "expert-features=8"]
    options = [f"--model.{size}" for size in [*sizes, "balance-coefficient=0.5"]]
    (tmp_path / "text").write_text(ALL_WORK)
    options += [f"--text={tmp_path}/text", "--batch-size=4", "--window=8", "--seed=2001"]
    options += ["--preset=granite", "--model.balance-experts", "--num-steps=1", "--dtype=float32"]
    run = command(tmp_path / "run", *options)
    [line] = run.metrics("training")
    trainer = build_trainer(run.config)
    state, batch = trainer.initial_state(), BATCHES[0]
    model = trainer.model(state.params)
    loss = train.trainer.step.token_losses(model, batch[:, :-1], batch[:, 1:]).mean()
    assert model.losses["balance_loss"] > 0.5
    np.testing.assert_allclose(line["balance_loss"], model.losses["balance_loss"], rtol=1e-5)
    np.testing.assert_allclose(line["loss"], loss + line["balance_loss"], rtol=1e-5)
    evaluated = trainer.evaluate(state.params, batch[None]).mean()
    np.testing.assert_allclose(evaluated, loss, rtol=1e-5)


def tensorboard_scalars(folder: Path) -> dict[tuple[int, str], float]:
    """The numbers in a run's file for TensorBoard, by step and name."""
    from tensorboardX.proto.event_pb2 import Event

    [path] = folder.glob("events.out.tfevents.*")
    content, scalars, place = path.read_bytes(), {}, 0
    while place < len(content):
        size = int.from_bytes(content[place : place + 8], "little")
        event = Event.FromString(content[place + 12 : place + 12 + size])
        place += size + 16
        for value in event.summary.value:
            scalars[event.step, value.tag] = value.simple_value
    return scalars


def assert_says(printed: str, *activities: str) -> None:
    """Asserts that a line of the heartbeat names each activity, a regular expression."""
    for activity in activities:
        line = rf"^{activity}( \(\d+ s so far\))?$"
        assert re.search(line, printed, re.MULTILINE), f"{activity} is not in {printed}"


class Activities(list):
    """The activities of a command, which also notes the descriptions of all of them."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def append(self, begun):
        describe, _ = begun
        self.seen.append(describe())
        super().append(begun)


@pytest.mark.slow
def test_every_command_says_what_takes_long(tmp_path, monkeypatch):
    folder, run = tmp_path / "run", ["--run", str(tmp_path / "run")]

    def activities(main: Callable[..., object], *args: str) -> list[str]:
        found = Activities()
        with monkeypatch.context() as patched:
            patched.setattr("twinscan.heartbeat._activities", found)
            main(args)
        return found.seen

    begun = activities(train_command.main, "--out", str(folder), *ARGS)
    assert begun[:6] == [
        "reading the options",
        "preparing the run",
        "reading the text",
        "building the model",
        "initializing the weights",
        "training: step 0 of 30",
    ]
    assert begun[6:10] == [
        "writing the checkpoint of step 0",
        "evaluating step 0 on the part train",
        "evaluating step 0 on the part val",
        "writing the checkpoint of step 0",
    ]
    assert begun[10:12] == ["compiling the training step", "evaluating step 10 on the part train"]

    opening = ["building the model", "reading the newest checkpoint"]
    evaluating = [f"evaluating the part {part}: 0 of {n} tokens" for part, n in PARTS.items()]
    assert activities(evaluate.main, *run) == [*opening, "reading the text", *evaluating]
    prompts = "--prompt", "A", "--prompt", "w", "--num-tokens", "9"
    opened = ["opening the model and the prompts", *opening, "compiling, and reading the prompt"]
    drawing = "drawing token 1 of at most 9"
    assert activities(generate.main, *run, *prompts) == [*opened, drawing]
    # Nothing interrupts a single text, which shows its own progress.
    assert activities(generate.main, *run, *prompts[2:]) == opened
    twin, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    comparing = "comparing the logits with those of the PyTorch twin"
    exporting = [*opening, f"writing {twin}", comparing]
    assert activities(export.main, *run, "--out", str(twin)) == exporting
    converting = [*opening, f"writing {other}"]
    assert activities(convert.main, "--from", str(folder), "--to", str(other)) == converting
    reading = ["opening the model and the prompts", f"reading {other}", opened[-1]]
    numbers = "--weights", str(other), "--prompt-tokens", "1 2"
    assert activities(generate.main, *numbers) == reading
    again = tmp_path / "c.safetensors"
    converting = [f"reading {other}", f"writing {again}"]
    assert activities(convert.main, "--from", str(other), "--to", str(again)) == converting


@pytest.mark.slow
def test_a_long_silence_is_broken(tmp_path, monkeypatch, capsys):
    """Of `train`, the lines go to the console, which also has a progress bar."""
    monkeypatch.setattr("twinscan.heartbeat.SECONDS", 0.005)
    with heartbeat():
        command(tmp_path / "run", "--log-every", "30", "--eval-every", "30")
        assert_says(
            capsys.readouterr().out,
            "building the model",
            "evaluating step 0 on the part train",
            "compiling the training step",
            r"training: step \d+ of 30",
        )
        evaluate.main(["--run", str(tmp_path / "run")])
        assert_says(capsys.readouterr().err, r"evaluating the part train: 0 of \d+ tokens")


def test_the_time_of_an_activity_is_its_own(tmp_path, monkeypatch, capsys):
    """That of the compilation, for example, does not include the evaluation before it."""
    evaluate = Trainer.evaluate

    def slow_evaluate(*args):
        time.sleep(1)
        return evaluate(*args)

    monkeypatch.setattr("twinscan.heartbeat.SECONDS", 0.005)
    monkeypatch.setattr(Trainer, "evaluate", slow_evaluate)
    with heartbeat():
        command(tmp_path / "run", "--num-steps", "1")
    assert "compiling the training step\n" in capsys.readouterr().out


@pytest.mark.parametrize("module", ["twinscan", "train"])
def test_the_imports_are_not_silent_either(module):
    """Without a warm cache of the disk, they may take longer than anything that follows."""
    code = (
        "import runpy, sys, twinscan.heartbeat; twinscan.heartbeat.SECONDS = 0.01; "
        f"sys.argv[1:] = {['train'] * (module == 'twinscan')} + ['--help']; "
        f"runpy.run_module({module!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert_says(done.stderr, "importing packages")


def test_a_heartbeat_comes_after_a_silence_only(monkeypatch):
    monkeypatch.setattr("twinscan.heartbeat.SECONDS", 0.2)
    lines = []
    with heartbeat(), written_by(lines.append), doing("sleeping"), heartbeat():
        for _ in range(8):
            time.sleep(0.05)
            line_printed()
        assert lines == []
        time.sleep(0.5)
    assert lines[0] == "sleeping (1 s so far)"
    assert len(lines) <= 2  # the inner heartbeat prints none of its own


def test_the_curve_has_a_caption(tmp_path, monkeypatch):
    captions = []
    monkeypatch.setattr(Figure, "supxlabel", lambda _, text, **__: captions.append(text))
    run = Run.create(tmp_path / "run", TrainConfig(), Characters("ab"), "")
    run.draw_curve()
    for step in range(25):
        run.log({"step": step, "loss": 1 / (1 + step)})
    run.draw_curve()
    short, long = captions
    assert short.startswith("RNN, 2,000 steps of 4 × 8 characters. Training steps: mean loss")
    assert long.replace("\n", " ").endswith("that step. Losses above the axis are cut off.")


def test_the_curve_leaves_out_what_it_cannot_draw(tmp_path):
    odd = [{"step": 0}, {"step": 1, "train": None, "val": "x"}, {"step": 2, "val": float("nan")}]
    for training, evaluations in (([], []), ([], odd), (odd, [{"step": 9, "val": 2.0}])):
        path = tmp_path / "curve.png"
        draw_curve(training, evaluations, path)
        assert path.read_bytes().startswith(b"\x89PNG")
    assert [*tmp_path.iterdir()] == [path]


def test_lines_of_before_and_odd_ones_are_read(tmp_path):
    run = Run.create(tmp_path / "run", TrainConfig(), Characters.of(ALL_WORK), "")
    old = {"step": 0, "train": 3.0, "val": 3.1, "seconds": 0.1}
    huge = f'{{"step": 9, "loss": {"9" * 400}}}'
    odd = ["[1]", '{"step": "x"}', "NaN", "", huge, '{"start": "x"}', '{"step": true}', "{"]
    (run.folder / "metrics.jsonl").write_text("\n".join([json.dumps(old), *odd]))
    run.log({"step": 7, "skipped": True, "rows": [1]})
    run.log({"step": 9, "loss": 2.0})
    assert run.metrics() == [old]
    assert [line["step"] for line in run.metrics("skipped")] == [7]
    run.log({"start": 7})
    assert run.metrics("skipped") == run.metrics("training") == []


def test_peaks_are_known_by_the_devices_kind():
    assert peak_flops("TPU v5 lite", "bfloat16") == 197e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "float32") == 67e12
    assert peak_flops("cpu", "float32") is None


def test_utilization_where_the_peak_is_known(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("train.run.monitor.peak_flops", lambda *_: 1e12)
    for line in command(tmp_path / "run").metrics("training"):
        expected = 6 * 1380 * line["tokens_per_second"] / 1e12
        np.testing.assert_allclose(line["mfu"], expected, rtol=0, atol=6e-5)
    assert "MFU" in capsys.readouterr().out


def test_tensorboard_names_its_package(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CommandLineError, match=r"--tensorboard: .* pip install tensorboardX$"):
        command(tmp_path / "run", "--tensorboard")
    assert not (tmp_path / "run").exists()
