"""Runs that become longer or get other options, and runs that begin with another's weights."""

import json
import re
import shutil
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
import tokenizers
from flax import nnx
from safetensors.numpy import save_file

import train.__main__ as train_command
from jax_models import (
    GriffinLanguageModelConfig,
    HawkLanguageModelConfig,
    HyenaDNALanguageModelConfig,
    to_torch,
)
from train.config import TrainConfig, changed
from train.digest import described
from train.export import export
from train.optimizer import AveragedState
from train.renamed import with_old_paths
from train.run import Run, build_trainer
from train.step import TrainState
from train.text import ALL_WORK
from train.vocabulary import Characters
from train.windows import Batches, split
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
    """What the steps of a run's config make of a state."""
    trainer = build_trainer(run.config)
    part = split(run.vocabulary.encode(ALL_WORK), 8)["train"]
    source = Batches(part, batch_size=4, seed=2001)
    for step in range(int(state.step), num_steps):
        state, _ = trainer.step(state, trainer.put(source[step]))
    return state


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_longer_run_stretches_its_schedule(schedule, tmp_path, capsys):
    run = command(tmp_path / "run", "--num-steps", "10", "--optimizer.schedule", schedule)
    before = restored(run)
    capsys.readouterr()
    run = resume(run, "--num-steps", "20")
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == "changed: num_steps 10 → 20, the rate of step 10 0 → 0.0005"
    chex.assert_trees_all_equal(restored(run), continued(before, run, 20))
    train_command.main(["--resume", str(run.folder)])
    assert "changed" not in capsys.readouterr().out


OPTIONS = {
    "rate and decay": [
        *("--optimizer.learning-rate", "3e-4"),
        *("--optimizer.weight-decay", "0.3"),
        *("--optimizer.decay-mask", "matrices"),
    ],
    "clipping": ["--optimizer.clip-norm", "0.5"],
    "clipping and average": ["--optimizer.clip-norm", "0.5", "--optimizer.ema-decay", "0.9"],
}
WITHOUT = ["--optimizer.clip-norm", "None", "--optimizer.ema-decay", "None"]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_the_optimiser_may_change(name, tmp_path, capsys):
    """With its moments kept, both ways, and wherever the process ends in between."""
    run = command(tmp_path / "run", "--num-steps", "10", *COSINE)
    before = restored(run)
    resume(run, "--num-steps", "20", *OPTIONS[name])
    changed = [line for line in capsys.readouterr().out.splitlines() if "changed" in line]
    assert len(changed) == 1
    for option, value in zip(OPTIONS[name][::2], OPTIONS[name][1::2], strict=True):
        of_config = str(float(value)) if value[0].isdigit() else value
        assert f"{option[2:].replace('-', '_')} " in changed[0]
        assert f" → {of_config}" in changed[0]
    run = Run.open(run.folder)
    state = restored(run)
    shutil.rmtree(run.checkpoints.folder / "20")
    killed = Run.open(run.folder)
    at_10 = restored(killed)
    moments = lambda state: [  # noqa: E731
        np.asarray(leaf) for leaf in jax.tree.leaves(state) if leaf.size > 1
    ]
    inner = at_10.optimizer_state
    inner = inner.optimizer_state if isinstance(inner, AveragedState) else inner
    chex.assert_trees_all_equal(moments(inner), moments(before.optimizer_state))
    chex.assert_trees_all_equal(continued(at_10, killed, 20), state)
    chex.assert_trees_all_equal(restored(resume(killed)), state)
    back = resume(Run.open(run.folder), "--num-steps", "30", *WITHOUT)
    chex.assert_trees_all_equal_structs(restored(back).optimizer_state, before.optimizer_state)
    without = state.optimizer_state
    without = without.optimizer_state if isinstance(without, AveragedState) else without
    without = without if len(without) == 3 else without[1]
    at_20 = state._replace(optimizer_state=without)
    chex.assert_trees_all_equal(restored(back), continued(at_20, back, 30))


def test_the_average_stays_where_clipping_comes(tmp_path):
    run = command(tmp_path / "run", "--num-steps", "10", "--optimizer.ema-decay", "0.9")
    before = restored(run)
    run = resume(run, "--num-steps", "10", "--optimizer.clip-norm", "0.5")
    after = restored(run)
    chex.assert_trees_all_equal(jax.tree.leaves(after), jax.tree.leaves(before))
    assert len(after.optimizer_state.optimizer_state) == 2


HYENA_DNA = HyenaDNALanguageModelConfig(
    vocab_size=20, context_length=8, features=4, mlp_features=4, tied_head=False
)


@pytest.mark.parametrize(
    ("model", "old_head", "paths"),
    [
        (
            HawkLanguageModelConfig(20, 4, 2, 8),
            0,
            {"layers.layers.1.hawk.conv.bias", "head.kernel"},
        ),
        (TrainConfig().model, 0, {"layers.cells.0.kernel_hh", "head.kernel"}),
        (HYENA_DNA, 1, {"layers.layers.0.norm1.scale", "lm_head.kernel"}),
    ],
)
def test_a_run_of_an_earlier_version_is_resumed(model, old_head, paths, tmp_path):
    """Its checkpoint has other paths of the parameters, their moments and their averages."""
    config = changed(TrainConfig(), {"model": model, "optimizer.ema_decay": 0.9})
    run = Run.create(tmp_path / "run", config, Characters.of(ALL_WORK), "")
    state = build_trainer(config).initial_state()
    old = with_old_paths(state)[old_head]
    assert {f"params.{path}.value" for path in paths} <= described(old).keys()
    run.checkpoints.save(0, old, None)
    run.checkpoints.wait()
    chex.assert_trees_all_equal(restored(Run.open(run.folder)), state)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("source") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(train_command, "report", lambda *_: None)
        run = command(folder, "--num-steps", "20")
    export(run.model(), folder / "twin.safetensors")
    return run


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_run_begins_with_the_weights_of_another(kind, source, tmp_path):
    folder = tmp_path / "tuned"
    if kind == "folder":
        train_command.main(["--out", str(folder), "--init", str(source.folder), "--seed", "3"])
    else:
        weights = source.folder / "twin.safetensors"
        command(folder, "--init", str(weights), "--num-steps", "20", "--seed", "3")
    run = Run.open(folder)
    assert run.config.model == source.config.model
    assert run.config.num_steps == 20
    trainer = build_trainer(run.config)
    at_0 = TrainState(*trainer.initial_state())._replace(
        params=nnx.state(source.model(), nnx.Param)
    )
    part = split(run.vocabulary.encode(ALL_WORK), 8)["train"]
    loader = Batches(part, batch_size=4, seed=3)
    for step in range(20):
        at_0, _ = trainer.step(at_0, trainer.put(loader[step]))
    chex.assert_trees_all_equal(restored(run), at_0)


@pytest.mark.slow
def test_the_same_command_goes_on_with_a_tuned_run(source, tmp_path, monkeypatch):
    """Also where it was killed before its first checkpoint."""
    args = ["--init", str(source.folder), "--seed", "3"]
    train_command.main(["--out", str(tmp_path / "whole"), *args])
    train_command.main(["--out", str(tmp_path / "cut"), *args])
    shutil.rmtree(tmp_path / "cut" / "checkpoints")
    (tmp_path / "cut" / "checkpoints").mkdir()
    train_command.main(["--resume", str(tmp_path / "cut")])
    whole, cut = (restored(Run.open(tmp_path / name)) for name in ("whole", "cut"))
    chex.assert_trees_all_equal(whole, cut)
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "20")
    train_command.main(["--out", str(tmp_path / "cut"), *args])
    chex.assert_trees_all_equal(whole, restored(Run.open(tmp_path / "cut")))


def test_a_tuned_run_has_the_characters_of_the_other(source, tmp_path):
    text = tmp_path / "text"
    text.write_text("All play and no work. " * 20)
    args = ["--init", str(source.folder), "--text", str(text)]
    train_command.main(["--out", str(tmp_path / "run"), *args])
    assert Run.open(tmp_path / "run").vocabulary == source.vocabulary
    text.write_text("Zoë works. " * 40)
    with pytest.raises(CommandLineError, match=r"^--text: not in the vocabulary: 'Z', 'ë'; it"):
        train_command.main(["--out", str(tmp_path / "other"), *args])
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_a_checkpoint_of_others_is_tuned(tmp_path):
    """Its model and its tokenizer are the default's; without steps, the weights stay."""
    folder, words = tmp_path / "griffin", ["<pad>", *"abcdefg"]
    folder.mkdir()
    model = GriffinLanguageModelConfig(
        vocab_size=len(words), features=8, num_layers=3, recurrent_features=8, mlp_features=6,
        num_heads=2, window=5,
    )  # fmt: skip
    weights = to_torch(model.build(rngs=nnx.Rngs(7)), "hf-file")
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.to_hf()))
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    text = tmp_path / "text"
    text.write_text("a b c d e f g " * 200)
    args = ["--init", str(folder), "--text", str(text), "--num-steps", "2"]
    train_command.main(["--out", str(tmp_path / "run"), *args, "--optimizer.learning-rate", "1e-9"])
    run = Run.open(tmp_path / "run")
    assert run.config.model == model
    assert run.vocabulary.encode("a g").tolist() == [1, 7]
    tuned = to_torch(run.model(), "hf-file")
    for key, array in weights.items():
        np.testing.assert_allclose(tuned[key], array, rtol=0, atol=1e-7, err_msg=key)


@pytest.mark.parametrize(
    ("init", "args", "fault"),
    [
        ("", ["--model.hidden-features", "16"], "head.kernel:"),
        ("", ["--model.num-layers", "2"], "blocks.cells.1.bias_hh:"),
        ("twin.safetensors", [], "--init: .*twin.safetensors: "),
        ("no.safetensors", [], "no.safetensors: No such file"),
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
    assert "\n" not in str(error.value)
    assert not folder.exists()
