"""Runs from the command line to the files in the folder."""

import dataclasses
import itertools
import re
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from safetensors.torch import load_file

import torch_ref
import train.command.train as train_command
from jax_models import LanguageModelConfig
from parity_tests.engine.bounds.tolerance import K, floor
from parity_tests.registry import CASES
from train.command import evaluate, export, generate
from train.data.text import ALL_WORK
from train.data.vocabulary import Characters
from train.run import folder as run_module
from train.run.config import PRESETS, TrainConfig
from train.run.folder import Run, build_trainer
from twinscan.command_line import CommandLineError, one_line_errors


def start(folder: Path, *args: str) -> Run:
    train_command.main(["--out", str(folder), "--eval-batches", "20", *args])
    return Run.open(folder)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "input.txt"
    path.write_text("Füße, naïve café — the quick brown fox.\n" * 60, encoding="utf-8")
    return path


def small(text: Path, *args: str, length: str = "--num-steps 10") -> list[str]:
    """The options for a small LSTM on a text."""
    options = "--preset lstm --model.hidden-features 16 --window 12 --batch-size 8 --eval-every 5"
    return [*options.split(), *length.split(), "--text", str(text), *args]


BY_ROWS = ["--val-rows", "30", "--model.num-layers", "2", "--model.dropout-rate", "0.5"]
CONSTANT = ["--optimizer.schedule", "constant"]


@pytest.fixture(scope="session")
def by_rows(text_file, tmp_path_factory) -> Path:
    """The folder of a run of half an epoch, with dropout and with random rows for validation."""
    folder = tmp_path_factory.mktemp("by_rows") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(train_command, "report", lambda *_: None)
        start(folder, *small(text_file, *BY_ROWS, *CONSTANT, length="--num-epochs 0.5"))
    return folder


@pytest.mark.slow
def test_a_run_shorter_than_its_presets_warmup(text_file, tmp_path, capsys, unreported):
    """The warm-up is shortened unless an option sets it. The same command finds the same run."""
    options = "--preset hawk --model.features 8 --model.num-layers 1 --window 12 --batch-size 8"
    args = [*options.split(), "--num-epochs", "0.1", "--text", str(text_file)]
    run = start(tmp_path / "run", *args)
    steps = run.config.num_steps
    short = run.config.optimizer.warmup_steps
    assert short == steps // 10
    line = f"the warm-up is shortened from 40 to {short} steps, because the run has only {steps}"
    assert line in capsys.readouterr().out
    assert start(tmp_path / "run", *args).config == run.config
    with pytest.raises(CommandLineError, match=r"^--optimizer.warmup-steps:"):
        start(tmp_path / "other", *args, "--optimizer.warmup-steps", "40")


@pytest.mark.xdist_group("finished")
def test_seed_experiment_reaches_the_seeds_loss(finished):
    metrics = Run.open(finished).metrics()
    assert [record["step"] for record in metrics] == list(range(0, 2001, 100))
    assert 2.8 < metrics[0]["train"] < 3.6
    assert metrics[-1]["train"] < 0.18
    assert metrics[-1]["val"] < 0.19
    assert (finished / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.xdist_group("finished")
def test_generates_the_sentence(finished, capsys):
    generate.main(
        ["--run", str(finished), "--greedy", "--prompt", "All work", "--num-tokens", "60"]
    )
    assert "All work and no play makes Jack a doll boy." in capsys.readouterr().out


@pytest.mark.xdist_group("finished")
def test_evaluates_on_the_whole_text(finished, capsys):
    evaluate.main(["--run", str(finished)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["train", "val"]
    assert all(0.1 < float(line.split()[1]) < 0.3 for line in lines)


@pytest.mark.slow
def test_evaluates_as_the_seed_does(by_rows, text_file, capsys):
    """Predicts the first 29 tokens of the validation rows, each from its own prefix."""
    evaluate.main(["--run", str(by_rows), "--num-tokens", "29"])
    line = capsys.readouterr().out.splitlines()[1]
    found = re.fullmatch(r"val: (.*) nats .*, mean probability (.*), over 29 characters", line)
    assert found is not None

    run = Run.open(by_rows)
    model = nnx.view(run.model(), deterministic=True)
    tokens = run.vocabulary.encode(text_file.read_text(encoding="utf-8"))
    order = np.random.default_rng(0).permutation((len(tokens) - 1) // 12)
    forward = jax.jit(lambda prefix: model(prefix)[0])
    p = []
    for t in range(29):
        row, length = order[t // 12] * 12, t % 12 + 1
        prefix = np.zeros((1, 12), int)
        prefix[0, :length] = tokens[row : row + length]
        p.append(float(jax.nn.softmax(forward(prefix)[0, length - 1])[tokens[row + length]]))
    expected = [-np.mean(np.log(p)), np.mean(p)]
    np.testing.assert_allclose([float(n) for n in found.groups()], expected, rtol=0, atol=6e-5)


@pytest.mark.optimized
def test_exported_weights_are_the_twins(finished, tmp_path, capsys):
    path = tmp_path / "weights.safetensors"
    export.main(["--run", str(finished), "--out", str(path)])
    assert_errs_as_the_twin(capsys.readouterr().out)
    twin = torch_ref.RNNLanguageModel()
    twin.load_state_dict(load_file(path))
    tokens = Characters.of(ALL_WORK).encode("All work")[None]
    logits, _ = Run.open(finished).model()(tokens)
    with torch.no_grad():
        single, double = (
            twin.to(dtype)(torch.tensor(tokens).long())[0].numpy()
            for dtype in (torch.float32, torch.float64)
        )
    scale = np.linalg.norm(double)
    bound = max(K * np.linalg.norm(single - double) / scale, floor(np.float32))
    assert np.linalg.norm(np.asarray(logits) - double) / scale <= bound


def assert_errs_as_the_twin(printed: str) -> None:
    """Asserts that the printed errors are within the tolerance of float32."""
    jax_error, twin_error = map(
        float, re.findall(r"JAX (\S+), the torch twin itself (\S+)", printed)[0]
    )
    assert jax_error <= max(K * twin_error, floor(np.float32))


def small_sizes(model: LanguageModelConfig) -> list[str]:
    """The sizes that a model of this class has in the registry, as command-line options."""
    small = next(case.config for case in CASES.values() if type(case.config) is type(model))
    sizes = {name: size for name, size in vars(small).items() if type(size) is int}
    kept = {"vocab_size", "context_length"}
    flags = {f"--model.{name.replace('_', '-')}": str(sizes[name]) for name in sizes.keys() - kept}
    return [*itertools.chain(*flags.items())]


@pytest.mark.slow
@pytest.mark.parametrize("preset", [name for name in PRESETS if not name.endswith("-small")])
def test_every_preset_can_be_built(preset):
    """`test_mesh.py` trains models of each kind, and the registry compares all with their twins."""
    assert build_trainer(PRESETS[preset]).abstract_state.averaged_params


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["annotated-hyena", "lstm", "rwkv7"])
def test_presets_train_export_and_generate(text_file, tmp_path, capsys, preset):
    steps = "--window 12 --batch-size 8 --eval-every 5 --num-steps 10 --val-rows 30"
    constant = "--optimizer.schedule constant --optimizer.warmup-steps 0 --dtype float32"
    options = [*steps.split(), *constant.split(), *small_sizes(PRESETS[preset].model)]
    start(tmp_path / "run", "--preset", preset, "--text", str(text_file), *options)
    assert_errs_as_the_twin(capsys.readouterr().out)
    generate.main(["--run", str(tmp_path / "run"), "--prompt", "naïve café", "--num-tokens", "2"])
    assert capsys.readouterr().out.startswith("naïve café")


@pytest.mark.slow
def test_steps_in_one_call_are_the_single_ones():
    """They are bitwise equal, including dropout masks. Batches from `count` on are not read."""
    rnn = dataclasses.replace(TrainConfig().model, num_layers=2, dropout_rate=0.5)
    trainer = build_trainer(dataclasses.replace(TrainConfig(), model=rnn))
    batches = np.random.default_rng(0).integers(0, 20, (4, 4, 9))
    singly, measures = trainer.initial_state(), []
    for batch in batches[:3]:
        singly, measured = trainer.step(singly, trainer.put(batch))
        measures.append(measured)
    at_once, at_once_measures = trainer.steps(trainer.initial_state(), trainer.put(batches), 3)
    assert int(at_once.step) == 3
    chex.assert_trees_all_equal(at_once, singly)
    zeros = jax.tree.map(jnp.zeros_like, measures[0])
    stacked = jax.tree.map(lambda *of_steps: jnp.stack(of_steps), *measures, zeros)
    chex.assert_trees_all_equal(at_once_measures, stacked)


def explodes_at(step: int):
    """An optimizer that makes the weights NaN after this many steps."""

    def build(config, num_steps):
        return optax.sgd(lambda count: jnp.where(count == step - 1, jnp.nan, 1e-3))

    return build


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nan_after", "failed", "latest"),
    [
        (8, "step 8: the weights are", 5),
        (15, "step 15: the weights or their losses are", 10),
    ],
)
def test_a_run_ends_where_its_numbers_are_not_finite(
    nan_after, failed, latest, text_file, tmp_path, monkeypatch, capsys
):
    """It notices weights of NaN at the next logged loss, or before it saves them."""
    folder = tmp_path / "run"
    args = small(text_file, *CONSTANT, length="--num-steps 30")
    monkeypatch.setattr(run_module, "build_optimizer", explodes_at(nan_after))
    with pytest.raises(SystemExit) as stop, one_line_errors("prog"):
        start(folder, *args)
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith(f"prog: error: {failed} not finite; the last finite checkpoint is of ")
    assert f"step {latest}, in {folder} " in error
    assert error.count("\n") == 1
    assert not (folder / "twin.safetensors").exists()
    run = Run.open(folder)
    assert run.metrics()[-1]["step"] == run.checkpoints.latest_step == latest


@pytest.mark.slow
@pytest.mark.usefixtures("unreported")
def test_resuming_gives_the_run_of_as_many_epochs(by_rows, text_file, tmp_path):
    """Training has 169 of 199 rows, so half an epoch takes 11 steps of 8 rows."""
    whole = Run.open(by_rows)
    assert (whole.config.num_steps, whole.config.num_epochs) == (11, None)
    start(tmp_path / "cut", *small(text_file, *BY_ROWS, *CONSTANT, length="--num-steps 6"))
    metrics = (tmp_path / "cut" / "metrics.jsonl").read_text()
    train_command.main(["--resume", str(tmp_path / "cut"), "--num-epochs", "0.5"])
    resumed = Run.open(tmp_path / "cut")
    assert resumed.config == whole.config
    assert (tmp_path / "cut" / "metrics.jsonl").read_text().startswith(metrics)
    weights = (nnx.state(run.model(), nnx.Param) for run in (whole, resumed))
    chex.assert_trees_all_equal(*weights)


@pytest.mark.slow
@pytest.mark.usefixtures("unreported")
def test_bfloat16_trains_with_the_seeds_optimizer(text_file, tmp_path):
    optimizer = {"clip-norm": "0.2", "betas": "0.9 0.98", "weight-decay": "0.4"}
    options = " ".join(f"--optimizer.{name} {value}" for name, value in optimizer.items())
    args = small(text_file, *options.split(), *BY_ROWS, "--dtype", "bfloat16")
    metrics = start(tmp_path / "run", *args, "--num-steps", "60").metrics()
    assert metrics[-1]["train"] < metrics[0]["train"] - 0.3


@pytest.mark.slow
def test_every_row_has_a_dropout_mask_of_its_own():
    """`test_mesh.py` tests that masks do not depend on the number of devices."""
    model = dataclasses.replace(TrainConfig().model, num_layers=2, dropout_rate=0.5)

    def loss(rows: int) -> float:
        trainer = build_trainer(dataclasses.replace(TrainConfig(), model=model, batch_size=rows))
        batch = trainer.put(np.tile(np.arange(9), (rows, 1)))
        return float(trainer.step(trainer.initial_state(), batch)[1].loss)

    assert abs(loss(2) - loss(1)) > 1e-2


def test_steps_replace_a_presets_epochs(monkeypatch, text_file):
    monkeypatch.setitem(PRESETS, "gru", dataclasses.replace(PRESETS["gru"], num_epochs=40.0))
    args = ["--preset", "gru", "--text", str(text_file)]
    assert train_command.parse_arguments(args).config.num_epochs == 40
    config = train_command.parse_arguments([*args, "--num-steps", "1000"]).config
    assert (config.num_steps, config.num_epochs) == (1000, None)
