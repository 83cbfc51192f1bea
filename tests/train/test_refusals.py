"""What the commands refuse: one line, exit code 2, nothing written. And how they print it."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import parity_tests.report.command as parity_command
import torch_ref
import train.__main__ as train_command
from jax_models import RWKV7LanguageModelConfig
from train import convert, evaluate, export, generate
from train.text import ALL_WORK
from twinscan import command_line
from twinscan.command_line import one_line_errors

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
    """Files and runs that a command cannot use."""
    folder = tmp_path_factory.mktemp("refused")
    os.mkfifo(folder / "pipe")
    for name, content in {
        "empty": b"",
        "short": b"abc",
        "latin-1": b"caf\xe9 ",
        "abc": b"abc " * 999,
        "zoe": b"Zoe " * 99,
        "changed": (ALL_WORK + "a").encode(),
        "damaged.safetensors": b"{}",
        "bytes.json": b"\xff\xfe\x00",
        "list.json": b'[{"loss": 3}]',
    }.items():
        (folder / name).write_bytes(content)
    (folder / "nothing").mkdir()
    config = (finished / "config.json").read_text()
    for name, changed, content in (
        ("damaged config", "config.json", '{"model"'),
        ("damaged vocabulary", "vocabulary.json", "5"),
        ("no such cell", "config.json", config.replace('"rnn"', '"foo"')),
        ("half a step", "config.json", config.replace('"num_steps": 2000', '"num_steps": 2.5')),
    ):
        shutil.copytree(finished, folder / name)
        (folder / name / changed).write_text(content)
    shutil.copytree(finished, folder / "no checkpoints")
    shutil.rmtree(folder / "no checkpoints" / "checkpoints")
    small = RWKV7LanguageModelConfig(vocab_size=30, features=8, num_layers=2, head_size=4)
    torch.save(torch_ref.RWKV7LanguageModel.from_config(small).state_dict(), folder / "a.pth")
    return folder


REFUSED = {
    "train --text {d}/no.txt": "no.txt: No such file",
    "train --text {d}/nothing": "the folder has no files",
    "train --text {d}/empty": "the file is empty",
    "train --text {d}/pipe": "pipe: not a file",
    "train --text {d}/short": "text is too short",
    "train --text {d}/latin-1": "not UTF-8 at byte 3",
    "train --preset gru": "--text: the preset gru needs a text file",
    "train --preset nix": "--preset:",
    "train --preset lsmt": "got lsmt (did you mean lstm?)\n",
    "train --model.cell lsmt": "got lsmt (did you mean ",
    "train --num-step 3": "--num-step (did you mean --num-steps?)",
    "convert --hlep --fomr x --to=y --param_dtype float32": (
        "options: --hlep (did you mean --help?), --fomr (did you mean --from?)\n"
    ),
    "convert --from x --to y --param-dtype flaot32": "--param-dtype:",
    "train --ema-decay 0.9": "(did you mean --optimizer.ema-decay?)",
    "parity --mutation": "(did you mean --mutations?)",
    "train --num-steps x": "--num-steps: invalid",
    "train --num-epochs 2 --num-steps 9": "--num-epochs:",
    "train --val-rows 56": "--val-rows:",
    "train --optimizer.warmup-steps 9000": "error: --optimizer.warmup-steps:",
    "train --optimizer.warmup-steps 50 --num-epochs 1": "error: --optimizer.warmup-steps:",
    "train --preset rwkv6 --text {d}/abc --model.features 30": "error: --model.head-size:",
    "train --init {d}/no.safetensors": "no.safetensors: No such file or directory\n",
    "train --model.vocab-size 7": "--model.vocab-size:",
    "train --window 9": "--window:",
    "train --model.hidden-features 99999999999999999999": "error: --model.hidden-features:",
    "train --out {f} --seed 7": "another eval_batches, seed (use --resume to continue it)",
    "train --out {d}": "the folder is not empty and holds no run",
    "train --out '{d}/run[1]'": "run paths must not contain *, ?, [ or \\, got [",
    "train --out '{d}/a\\b'": "run paths must not contain *, ?, [ or \\, got \\",
    "train --out {d}/\udcff": ": expected a path in UTF-8",
    "train --resume {f} --text {d}/changed": "(--allow-changed-text continues with this one",
    "train --resume {f} --preset all-work": "--preset:",
    "train --resume {d}": "not the folder of a run",
    "train --resume {f} --out {d}/o": "--out:",
    "train --resume {f} --num-steps 5": "--num-steps:",
    "train --resume {f} --model.cell gru": "cannot change model.cell of a run",
    "train --resume": "--resume",
    "generate --run {d}": "it has no config.json",
    "generate --run '{d}/damaged config'": "config.json is damaged: ",
    "generate --run '{d}/damaged vocabulary'": "vocabulary.json is damaged: ",
    "generate --run '{d}/no such cell'": "cell:",
    "generate": "expected exactly one of --run and --weights",
    "generate --run {f} --prompt 1 --prompt-tokens 1": "--prompt and --prompt-tokens",
    "generate --weights {d}/a.pth": "--weights:",
    "generate --weights {d}/b.pth --prompt x": "b.pth: No such file or directory",
    "generate --weights {d}/damaged.safetensors --prompt x": "damaged.safetensors: ",
    "generate --weights {f}/twin.safetensors --prompt x": "(it has embedding.weight, ",
    "generate --weights {d}/a.pth --prompt x": "World vocabulary (65536 tokens), got one of 30",
    "generate --weights {d}/a.pth --prompt-tokens '3 x'": "--prompt-tokens:",
    "generate --weights {d}/a.pth --prompt-tokens ' '": "--prompt-tokens:",
    "generate --weights {d}/a.pth --prompt-tokens '3 30'": "expected values in 0 … 29, got [30]",
    "generate --weights {d}/a.pth --prompt-tokens 99999999999": "got [99999999999]",
    "generate --run {f} --seed 99999999999999999999": "--seed:",
    "generate --run {f} --greedy --top-k 3": "--greedy:",
    "generate --run {f} --prompt Zoë": "--prompt: not in the vocabulary: 'Z', 'ë'",
    "generate --run {f} --prompt ''": "--prompt:",
    "evaluate --run {f} --num-tokens 0": "--num-tokens:",
    "evaluate --run '{d}/no checkpoints'": "it has no checkpoints",
    "evaluate --run '{d}/half a step'": "num_steps:",
    "evaluate --run {f} --text {d}/zoe": "--text: not in the vocabulary: 'Z'",
    "export --run {f} --out {f}/config.json": "config.json exists already",
    "export --run {f} --out {d}/no/w": "No such file or directory",
    "export --run {f} --out {d}": "Is a directory",
    "parity --case GRUScratch --json {d}": "Is a directory",
    "parity --case RNNDeep --case nix --json {d}/a.json": "--case: no case has nix",
    "parity --json {d}/a --html {d}/../{d.name}/a": "expected a file of its own for the page",
    "parity --json {d}/a.json --html {d}/no/a.html": "--html: ",
    "parity --case '1 layer by cuDNN' --platform cpu": "--case: these run on gpu only",
    "parity --platform tpu": "this machine has no tpu",
    "parity --case RNNDeep --compare {d}/empty": "empty: not a record of --json",
    "parity --case RNNDeep --compare {d}/bytes.json": "bytes.json: not a record of --json",
    "parity --case RNNDeep --compare {d}/list.json": "list.json: not a record of --json",
    "parity --case RNNDeep --compare {d}": "--compare: ",
    "parity --case RNNDeep --compare {d}/none.json": "none.json: No such file or directory",
}


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


def test_a_module_ends_with_code_2_and_no_traceback():
    done = subprocess.run(
        [sys.executable, "-m", "train", "--text", "no-such-file.txt"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == ("python -m train: error: no-such-file.txt: No such file or directory\n")


def in_ascii(*args: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments where only ASCII can be printed."""
    return subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
    )


def test_ascii_takes_the_place_of_what_cannot_be_printed():
    """Of every command: what they print goes through `one_line_errors`."""
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


def test_an_unknown_option_is_told_without_rules_in_ascii():
    done = in_ascii("-m", "train", "--nix", "1")
    assert done.stderr.startswith("python -m train: error: Unrecognized options: --nix")
    assert "--- " not in done.stderr
    done = in_ascii("-m", "train", "--num-step", "1")
    assert done.stderr.endswith("options: --num-step (did you mean --num-steps?)\n")


@pytest.mark.parametrize(
    ("python", "line"),
    [
        ("/home/me/project/.venv/bin/python", ".venv/bin/python -m train"),
        ("/opt/some python/bin/python", "'/opt/some python/bin/python' -m train"),
        ("/usr/bin/python", "python -m train"),
    ],
)
def test_a_printed_command_works_as_printed(python, line, monkeypatch):
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setattr(command_line.shutil, "which", lambda name: "/usr/bin/python")
    monkeypatch.setattr(Path, "cwd", lambda: Path("/home/me/project"))
    assert command_line.command("train") == line
