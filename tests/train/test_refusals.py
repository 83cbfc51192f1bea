"""Commands, configs and functions reject wrong arguments in one line that names the argument."""

import dataclasses
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import torch
from flax import nnx

import parity_tests.report.command as parity_command
import torch_ref
import train.command.train as train_command
from jax_models import RNNLanguageModel, RNNLanguageModelConfig, RWKV7LanguageModelConfig
from train.checks import (
    checked_betas,
    checked_contents,
    checked_decay,
    checked_not_negative,
    checked_paths,
    checked_probability,
    checked_seed,
    checked_texts,
)
from train.command import convert, evaluate, export, generate
from train.data.text import Text
from train.data.vocabulary import Characters
from train.data.windows import Batches, Windows, split
from train.run.config import TrainConfig, from_fields, to_fields
from train.run.folder import Run, build_trainer
from train.trainer.mesh import MeshConfig, build_mesh
from train.trainer.optimizer import OptimizerConfig, build_optimizer
from train.trainer.step import Trainer
from twinscan import command_line
from twinscan.command_line import one_line_errors
from twinscan.heartbeat import IMPORTING

COMMANDS = {
    "train": train_command.main,
    "convert": convert.main,
    "generate": generate.main,
    "evaluate": evaluate.main,
    "export": export.main,
    "parity": parity_command.main,
}


@pytest.fixture(scope="module")
def folder(finished, tmp_path_factory) -> Path:
    """A folder with files and runs that commands cannot use."""
    folder = tmp_path_factory.mktemp("refused")
    for name, content in {
        "abc": b"abc " * 999,
        "damaged.safetensors": b"{}",
        "bytes.json": b"\xff\xfe\x00",
    }.items():
        (folder / name).write_bytes(content)
    (folder / "no checkpoints").mkdir()
    for name in ("config.json", "vocabulary.json"):
        shutil.copy(finished / name, folder / "no checkpoints")
    small = RWKV7LanguageModelConfig(vocab_size=30, features=8, num_layers=2, head_size=4)
    torch.save(torch_ref.RWKV7LanguageModel.from_config(small).state_dict(), folder / "a.pth")
    torch.save(torch.nn.LSTM(2, 3).state_dict(), folder / "other.pth")
    return folder


REFUSED = {
    "train --preset gru": "--text: the preset gru needs a text file",
    "train --preset lsmt": "got lsmt (did you mean lstm?)\n",
    "convert --hlep --fomr x --to=y --param_dtype float32": (
        "options: --hlep (did you mean --help?), --fomr (did you mean --from?)\n"
    ),
    "train --ema-decay 0.9": "(did you mean --optimizer.ema-decay?)",
    "train --num-steps x": "--num-steps: invalid",
    "train --num-epochs 2 --num-steps 9": "--num-epochs:",
    "train --preset rwkv6 --text {d}/abc --model.features 30": "error: --model.head-size:",
    "train --init {d}/no.safetensors": "no.safetensors: No such file or directory\n",
    "train --init {d}/other.pth": "if twinscan train wrote this file, give the --preset and",
    "train --preset all-work --init {d}/a.pth": "if the model of the checkpoint has other sizes, ",
    "train --accumulate 3": "--accumulate:",
    "train --model.vocab-size 7": "--model.vocab-size:",
    "train --window 9": "--window:",
    "train --out {f} --seed 7": "another eval_batches, seed (use --resume to continue it)",
    "train --out {d}": "the folder is not empty and holds no run",
    "train --out '{d}/run[1]'": "run paths must not contain *, ?, [ or \\, got [",
    "train --out {d}/\udcff": ": expected a path in UTF-8",
    "train --resume {f} --preset all-work": "--preset:",
    "train --resume {f} --out {d}/o": "--out:",
    "train --resume {f} --num-steps 5": "--num-steps:",
    "train --resume {f} --model.cell gru": "cannot change model.cell of a run",
    "generate --run {d}": "it has no config.json",
    "generate": "expected exactly one of --run and --weights",
    "generate --run {f} --prompt 1 --prompt-tokens 1": "--prompt and --prompt-tokens",
    "generate --weights {d}/a.pth": "--weights:",
    "generate --weights {d}/damaged.safetensors --prompt x": "damaged.safetensors: ",
    "generate --weights {f} --prompt x": "got the folder of a run: use --run on the command line",
    "generate --weights {f}/twin.safetensors --prompt x": "tokens), got one of 20 (give the tokens",
    "generate --weights {d}/a.pth --prompt-tokens '3 x'": "--prompt-tokens:",
    "generate --weights {d}/a.pth --prompt-tokens ' '": "--prompt-tokens:",
    "generate --weights {d}/a.pth --prompt-tokens 99999999999": "got [99999999999]",
    "generate --run {f} --greedy --top-p 0.9": "--greedy:",
    "generate --run {f} --stop ab": "--stop: expected a single token, got 'ab', which has 2",
    "generate --run {f} --prompt a --chat": "--chat: expected with --weights and --prompt",
    "generate --run {f} --system a": "--system: expected with --chat",
    "generate --weights {d}/a.pth --prompt-tokens 1 --stop 30": "got [30]",
    "generate --run {f} --prompt Zoë": "--prompt: not in the vocabulary: 'Z', 'ë'",
    "generate --run {f} --prompt ''": "--prompt:",
    "evaluate --run '{d}/no checkpoints'": "it has no checkpoints",
    "export --run {f} --out {f}/config.json": "config.json exists already",
    "export --run {f} --out {d}": "Is a directory",
    "parity --case GRUScratch --json {d}": "Is a directory",
    "parity --case RNNDeep --case nix --json {d}/a.json": "--case: no case has nix",
    "parity --json {d}/a --html {d}/../{d.name}/a": "expected a file of its own for the page",
    "parity --json {d}/a.json --html {d}/no/a.html": "--html: ",
    "parity --case '1 layer by cuDNN' --platform cpu": "--case: these run on gpu only",
    "parity --platform tpu": "this machine has no tpu",
    "parity --case RNNDeep --compare {d}/bytes.json": "bytes.json: not a record of --json",
    "parity --case RNNDeep --compare {d}/none.json": "none.json: No such file or directory",
}


@pytest.mark.xdist_group("finished")
@pytest.mark.parametrize("line", REFUSED)
def test_refuses_in_one_line(line, finished, folder, capsys):
    def files():
        return sorted([*finished.rglob("*"), *folder.rglob("*")])

    before = files()
    command, *args = shlex.split(line.format(d=folder, f=finished))
    with pytest.raises(SystemExit) as stop, one_line_errors("prog"):
        COMMANDS[command](args)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("prog: error: ")
    assert REFUSED[line] in error
    assert error.count("\n") == 1
    assert files() == before


def in_ascii(*args: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments, and with an output that accepts only ASCII."""
    return subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
    )


@pytest.mark.slow
def test_ascii_takes_the_place_of_what_cannot_be_printed():
    """All commands print through `one_line_errors`."""
    code = """
import sys
from twinscan.command_line import CommandLineError, one_line_errors
with one_line_errors("x"):
    print("1 — 2 … ≥ 3 × 4 µs, é, 5\u00a0ms, 中")
    raise CommandLineError("naïve …")
"""
    done = in_ascii("-c", code)
    assert done.stdout == "1 - 2 ... >= 3 x 4 us, e, 5 ms, ?\n"
    assert done.stderr == "x: error: naive ...\n"


def test_a_module_ends_with_code_2_and_one_line_without_rules_in_ascii():
    done = in_ascii("-m", "train", "--nix", "1")
    assert done.returncode == 2
    # On a busy machine, the command first says that it still imports packages.
    [line] = [each for each in done.stderr.splitlines() if not each.startswith(IMPORTING)]
    assert line.startswith("python -m train: error: Unrecognized options: --nix")
    assert "--- " not in line


def test_a_reader_may_close_the_pipe(monkeypatch):
    """As in `twinscan train --help | head`."""

    def main(*_):
        print("options")
        raise SystemExit(0)

    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit) as stop:
            command_line.run_command(main, [], "prog")
    assert stop.value.code == 0


@pytest.mark.parametrize(
    ("installed", "on_path", "line"),
    [
        ("project/.venv/bin", "", "project/.venv/bin/twinscan"),
        ("some python/bin", "usr/bin", "'some python/bin/twinscan'"),
        ("usr/bin", "usr/bin", "twinscan"),
        ("", "usr/bin", "usr/bin/python -m twinscan"),
    ],
)
def test_a_printed_command_works_as_printed(installed, on_path, line, tmp_path, monkeypatch):
    """It is the script, because `python -m` would first look for modules in the user's folder."""
    monkeypatch.chdir(tmp_path)
    if installed:
        (tmp_path / installed).mkdir(parents=True)
        (tmp_path / installed / "twinscan").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / (installed or "usr/bin") / "python"))
    found = str(tmp_path / on_path / "twinscan") if on_path else None
    monkeypatch.setattr(command_line.shutil, "which", lambda name: found)
    assert command_line.command_line_of_twinscan() == line


CHECKS = {
    checked_not_negative: (-1, float("nan")),
    checked_betas: (0.9, "ab", (0.9,), (0.9, 1), (float("nan"), 0), (True, 0), None),
    checked_decay: (0, 1),
    checked_paths: (True, [3]),
    checked_texts: (b"x", [3]),
    checked_contents: ([], {"name": "text"}),
    checked_probability: (-0.1, 2),
    checked_seed: (-1, 2**31),
}


@pytest.mark.parametrize("check", CHECKS)
def test_each_kind_of_option_has_its_range(check):
    for value in CHECKS[check]:
        with pytest.raises((TypeError, ValueError), match=r"^name: expected [^\n]+, got [^\n]+$"):
            check("name", value)


MODEL = nnx.eval_shape(lambda: RNNLanguageModelConfig().build(rngs=nnx.Rngs(0)))
VOCABULARY = Characters("abc")
TOKENS = np.arange(99)
TRAINER = {
    "build": lambda: MODEL,
    "optimizer": optax.sgd(1.0),
    "mesh": build_mesh(MeshConfig(), rows=4, window=8, devices=jax.devices()),
    "seed": 0,
}
CALLS = {
    TrainConfig: {},
    OptimizerConfig: {},
    generate.Arguments: {"run": Path()},
    Characters: {"characters": "abc"},
    Characters.of: {"text": "abc"},
    VOCABULARY.encode: {"text": "abc"},
    split: {"tokens": TOKENS, "window": 4},
    Batches: {"windows": Windows(TOKENS, 4, TOKENS[:9]), "batch_size": 2, "seed": 0},
    build_optimizer: {"config": OptimizerConfig(), "num_steps": 9},
    build_trainer: {"config": TrainConfig()},
    Trainer: TRAINER,
    Run.open: {"folder": Path()},
    Run.create: {
        "folder": Path(),
        "config": TrainConfig(),
        "vocabulary": VOCABULARY,
        "text_digest": "",
    },
    export.export: {"model": MODEL, "path": Path()},
    RNNLanguageModel: {"config": RNNLanguageModelConfig(), "rngs": nnx.Rngs(0)},
}
UNCHECKED = {"self", "mesh", "devices"}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__qualname__)
def test_every_argument_is_checked(call):
    parameters = inspect.signature(call.__init__ if isinstance(call, type) else call).parameters
    for name in parameters.keys() - UNCHECKED:
        with pytest.raises((TypeError, ValueError)) as error:
            call(**{**CALLS[call], name: object()})
        assert re.fullmatch(rf"{name}: expected [^\n]+, got [^\n]+", str(error.value))


def test_numpys_numbers_are_kept_as_pythons():
    config = TrainConfig(num_steps=np.int64(3), num_epochs=np.float32(2), seed=np.uint8(1))
    assert from_fields(to_fields(config)) == dataclasses.replace(config)
    numbers = config.num_steps, config.num_epochs, config.seed
    assert [*map(type, numbers)] == [int, float, int]


def test_a_path_may_be_a_str(tmp_path):
    (tmp_path / "text").write_text("abc")
    assert [*Text([str(tmp_path / "text")]).pieces()] == ["abc", None]
    assert TrainConfig(text="x").text == (Path("x"),)  # pyright: ignore[reportArgumentType]
    assert TrainConfig(init="x").init == Path("x")  # pyright: ignore[reportArgumentType]
