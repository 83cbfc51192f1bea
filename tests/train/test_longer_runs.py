"""Runs that are extended or get other options, and runs that start from another run's weights."""

import re
import shutil
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from flax import nnx

import train.command.train as train_command
from train.command.export import export
from train.data.text import ALL_WORK
from train.data.vocabulary import Characters
from train.data.windows import Batches, split
from train.run.config import TrainConfig, with_options
from train.run.folder import Run, build_trainer
from train.trainer.optimizer import AveragedState
from train.trainer.step import TrainState
from twinscan.command_line import CommandLineError

pytestmark = pytest.mark.usefixtures("unreported")
SIZES = ["--eval-every", "10", "--eval-batches", "4", "--model.hidden-features", "12"]
COSINE = ["--optimizer.schedule", "cosine"]


def command(folder: Path, *args: str) -> Run:
    train_command.main(["--out", str(folder), *SIZES, *args])
    return Run.open(folder)


def resume(run: Run, *args: str) -> Run:
    train_command.main(["--resume", str(run.folder), *args])
    return Run.open(run.folder)


def restored(run: Run) -> TrainState:
    return run.restore(build_trainer(run.config))


def continued(state: TrainState, run: Run, num_steps: int) -> TrainState:
    """The state after the remaining steps of a run's config."""
    trainer = build_trainer(run.config)
    part = split(run.vocabulary.encode(ALL_WORK), 8)["train"]
    source = Batches(part, batch_size=4, seed=run.config.seed)
    for step in range(int(state.step), num_steps):
        state, _ = trainer.step(state, trainer.put(source[step]))
    return state


@pytest.mark.slow
def test_a_longer_run_stretches_its_schedule(tmp_path, capsys):
    run = command(tmp_path / "run", "--num-steps", "10", *COSINE)
    before = restored(run)
    capsys.readouterr()
    run = resume(run, "--num-steps", "20")
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == "changed: num_steps 10 → 20, the rate of step 10 0 → 0.0005"
    chex.assert_trees_all_equal(restored(run), continued(before, run, 20))
    train_command.main(["--resume", str(run.folder)])
    assert "changed" not in capsys.readouterr().out


def test_a_resumed_run_keeps_its_warmup(tmp_path):
    """The warm-up is kept even if it is too long for the run, unless another one is given."""
    config = with_options(TrainConfig(), {"optimizer.warmup_steps": 6, "num_steps": 10})
    folder = Run.create(tmp_path / "run", config, Characters.of(ALL_WORK), "").folder
    args = ["--resume", str(folder), "--num-steps", "6"]
    for given, expected in (([], 6), (["--optimizer.warmup-steps", "2"], 2)):
        plan = train_command.make_plan(train_command.parse_arguments([*args, *given]))
        assert plan.config.optimizer.warmup_steps == expected
    with pytest.raises(CommandLineError, match=r"^--optimizer.warmup-steps: .* the 6 steps"):
        train_command.main(args)


def inner(optimizer_state):
    """The state of the optimizer without the average."""
    is_averaged = isinstance(optimizer_state, AveragedState)
    return optimizer_state.optimizer_state if is_averaged else optimizer_state


def moments(optimizer_state) -> list[np.ndarray]:
    leaves = jax.tree.leaves(inner(optimizer_state))
    return [np.asarray(leaf) for leaf in leaves if leaf.size > 1]


WITHOUT = ["--optimizer.clip-norm", "None", "--optimizer.ema-decay", "None"]


@pytest.mark.slow
def test_the_optimiser_may_change(tmp_path, capsys):
    """The moments are kept in both directions, even if a process is killed in between."""
    run = command(tmp_path / "run", "--num-steps", "10", *COSINE)
    before = restored(run)
    options = "--learning-rate 3e-4 --decay-mask matrices --clip-norm 0.5 --ema-decay 0.9"
    resume(run, "--num-steps", "20", *options.replace("--", "--optimizer.").split())
    assert "optimizer.decay_mask all → matrices" in capsys.readouterr().out
    run = Run.open(run.folder)
    state = restored(run)
    shutil.rmtree(run.checkpoints.folder / "20")
    killed = Run.open(run.folder)
    at_10 = restored(killed)
    chex.assert_trees_all_equal(*map(moments, (at_10.optimizer_state, before.optimizer_state)))
    chex.assert_trees_all_equal(restored(resume(killed)), state)
    back = resume(Run.open(run.folder), "--num-steps", "30", *WITHOUT)
    chex.assert_trees_all_equal_structs(restored(back).optimizer_state, before.optimizer_state)
    _, without_average = inner(state.optimizer_state)
    at_20 = state._replace(optimizer_state=without_average)
    chex.assert_trees_all_equal(restored(back), continued(at_20, back, 30))


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("source") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(train_command, "report", lambda *_: None)
        run = command(folder, "--num-steps", "20")
    export(run.model(), folder / "twin.safetensors")
    return run


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_another(source, tmp_path):
    """The same command continues the run, even if it was killed before its first checkpoint."""
    folder = tmp_path / "tuned"
    args = ["--out", str(folder), "--init", str(source.folder), "--seed", "3"]
    train_command.main(args)
    run = Run.open(folder)
    assert run.config.model == source.config.model
    assert run.config.num_steps == 20
    at_0 = build_trainer(run.config).initial_state()
    at_0 = at_0._replace(params=nnx.state(source.model(), nnx.Param))
    whole = restored(run)
    chex.assert_trees_all_equal(continued(at_0, run, 20), whole)
    for lost in ("*", "20"):
        for checkpoint in run.checkpoints.folder.glob(lost):
            shutil.rmtree(checkpoint)
        train_command.main(args)
        chex.assert_trees_all_equal(restored(Run.open(folder)), whole)


def test_a_tuned_run_has_the_characters_of_the_other(source, tmp_path):
    text = tmp_path / "text"
    text.write_text("All play and no work. " * 20)
    args = ["--init", str(source.folder), "--text", str(text), "--out", str(tmp_path / "run")]
    plan = train_command.make_plan(train_command.parse_arguments(args))
    assert plan.vocabulary == source.vocabulary
    text.write_text("Zoë works. " * 40)
    with pytest.raises(CommandLineError, match=r"^--text: not in the vocabulary: 'Z', 'ë'; it"):
        train_command.main(args)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("init", "args", "fault"),
    [
        ("", ["--model.hidden-features", "16"], "head.kernel:"),
        ("", ["--model.num-layers", "2"], "blocks.cells.1.bias_hh:"),
        ("twin.safetensors", ["--preset", "all-work"], "--init: .*twin.safetensors: "),
        ("config.json", [], "config.json: "),
        ("checkpoints", [], "checkpoints:"),
        ("", ["--resume", "x"], "--init: a run is resumed with its own weights"),
    ],
)
def test_refuses_weights_of_another_model(init, args, fault, source, tmp_path):
    folder = tmp_path / "run"
    args = ["--init", str(source.folder / init), *args]
    with pytest.raises(CommandLineError) as error:
        train_command.main([*args] if "--resume" in args else ["--out", str(folder), *args])
    assert re.search(fault.replace("[", r"\[").replace("]", r"\]"), str(error.value))
    assert str(error.value).startswith("--init: ")
    assert "\n" not in str(error.value)
    assert not folder.exists()


@pytest.mark.parametrize("lost", ["checkpoints/*", "config.json", "checkpoints/*/manifest.json"])
def test_refuses_the_weights_of_a_damaged_run(lost, source, tmp_path):
    copy = shutil.copytree(source.folder, tmp_path / "copy")
    for path in copy.glob(lost):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(CommandLineError, match=f"^--init: {copy}.*: "):
        train_command.main(["--out", str(tmp_path / "run"), "--init", str(copy)])
