"""The output of a run, and its response to steps whose loss or gradient is not finite."""

import json
import re
import time
from pathlib import Path

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

import train.command.train as train_command
import train.trainer.step
from train.command import evaluate
from train.data.text import ALL_WORK
from train.data.vocabulary import Characters
from train.data.windows import Batches, split
from train.process import heartbeat
from train.run.config import TrainConfig
from train.run.curve import draw_curve
from train.run.folder import Run, build_trainer
from train.run.monitor import peak_flops
from twinscan.command_line import CommandLineError, one_line_errors

pytestmark = pytest.mark.usefixtures("unreported")
ARGS = ["--num-steps", "30", "--eval-every", "10", "--eval-batches", "2", "--log-every", "6"]
TRAINING = split(Characters.of(ALL_WORK).encode(ALL_WORK), 8)["train"]
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
    # On a busy machine, a line such as "building the model (10 s)" may come first.
    printed = re.sub(r"^.* \(\d+ s\)\n", "", capsys.readouterr().out, flags=re.MULTILINE)
    assert printed.startswith(
        f"no checkpoint yet: starting from scratch, in {run.folder}\n1 × cpu, 1,380 parameters\n"
    )
    assert "compiled in " in printed
    scalars = tensorboard_scalars(run.folder)
    for line in run.metrics() + training:
        for name in line.keys() - {"step"}:
            np.testing.assert_allclose(scalars.pop((line["step"], name)), line[name], rtol=1e-6)
    assert not scalars


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


@pytest.mark.slow
def test_a_long_silence_is_broken(tmp_path, monkeypatch, capsys):
    """While the run is compiled, evaluated and trained, and not while it prints lines anyway."""
    monkeypatch.setattr("train.process.heartbeat.SECONDS", 0.001)
    command(tmp_path / "run", "--log-every", "30", "--eval-every", "30")
    printed = capsys.readouterr().out
    for activity in (
        "building the model",
        "evaluating step 0 on the part train",
        "compiling the training step",
        r"step \d+ of 30",
    ):
        assert re.search(rf"^{activity} \(\d+ s\)$", printed, re.MULTILINE), activity
    evaluate.main(["--run", str(tmp_path / "run")])
    assert re.search(r"^train: 0 of \d+ tokens \(0 s\)$", capsys.readouterr().err, re.MULTILINE)
    monkeypatch.setattr("train.process.heartbeat.SECONDS", 0.2)
    lines = []
    with heartbeat.heartbeat(lines.append), heartbeat.doing("sleeping"):
        for _ in range(8):
            time.sleep(0.05)
            heartbeat.line_printed()
        assert lines == []
        time.sleep(0.5)
    assert lines[0] == "sleeping (1 s)"


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
