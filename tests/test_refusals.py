"""What the commands refuse: one line, exit code 2, nothing written. And how they print it."""

import os
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


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def pipe(path: Path) -> str:
    os.mkfifo(path)
    return str(path)


def damaged(finished: Path, folder: Path, name: str, content: str | None) -> str:
    shutil.copytree(finished, folder)
    if content is None:
        shutil.rmtree(folder / name)
    else:
        (folder / name).write_text(content)
    return str(folder)


def rwkv(folder: Path) -> str:
    """A checkpoint of a small vocabulary."""
    config = RWKV7LanguageModelConfig(vocab_size=30, features=8, num_layers=2, head_size=4)
    torch.save(torch_ref.RWKV7LanguageModel.from_config(config).state_dict(), folder / "a.pth")
    return str(folder / "a.pth")


REFUSED = {
    "missing text": ("train", lambda d, f: ["--text", str(d / "no.txt")], "no.txt: No such file"),
    "folder for a text": ("train", lambda d, f: ["--text", str(d)], "the folder has no files"),
    "empty text": ("train", lambda d, f: ["--text", write(d / "e", b"")], "the file is empty"),
    "pipe for a text": ("train", lambda d, f: ["--text", pipe(d / "p")], "p: not a file"),
    "short text": ("train", lambda d, f: ["--text", write(d / "s", b"abc")], "text is too short"),
    "latin-1 text": (
        "train",
        lambda d, f: ["--text", write(d / "l", b"caf\xe9 ")],
        "not UTF-8 at byte 3",
    ),
    "preset without its text": (
        "train",
        lambda d, f: ["--preset", "gru"],
        "--text: the preset gru needs a text file",
    ),
    "unknown preset": (
        "train",
        lambda d, f: ["--preset", "nix"],
        "--preset: expected one of all-work",
    ),
    "misspelled preset": (
        "train",
        lambda d, f: ["--preset", "lsmt"],
        "authentic-hyena-small, got lsmt (did you mean lstm?)\n",
    ),
    "misspelled value of a group": (
        "train",
        lambda d, f: ["--model.cell", "lsmt"],
        "--model.cell: expected one of rnn, lstm, gru, min_gru, min_lstm, got lsmt (did you mean ",
    ),
    "unknown option": ("train", lambda d, f: ["--nix", "3"], "Unrecognized options: --nix"),
    "misspelled option": (
        "train",
        lambda d, f: ["--num-step", "3"],
        "Unrecognized options: --num-step (did you mean --num-steps?)",
    ),
    "option without its group": (
        "train",
        lambda d, f: ["--ema-decay", "0.9"],
        "(did you mean --optimizer.ema-decay?)",
    ),
    "misspelled option of another command": (
        "parity",
        lambda d, f: ["--mutation"],
        "(did you mean --mutations?)",
    ),
    "misspelled options beside missing ones": (
        "convert",
        lambda d, f: ["--hlep", "--fomr", "x", "--to=y", "--param_dtype", "float32"],
        "options: --hlep (did you mean --help?), --fomr (did you mean --from?)\n",
    ),
    "misspelled value that may be left out": (
        "convert",
        lambda d, f: ["--from", "x", "--to", "y", "--param-dtype", "flaot32"],
        "--param-dtype: expected one of float64, float32, float16, bfloat16, got flaot32 (did you ",
    ),
    "word for a number": ("train", lambda d, f: ["--num-steps", "x"], "--num-steps: invalid"),
    "no steps": ("train", lambda d, f: ["--num-steps", "0"], "--num-steps: expected a positive"),
    "no epochs": ("train", lambda d, f: ["--num-epochs", "nan"], "--num-epochs: expected a fini"),
    "epochs and steps": (
        "train",
        lambda d, f: ["--num-epochs", "2", "--num-steps", "9"],
        "--num-epochs: cannot be combined with --num-steps",
    ),
    "no row to validate on": ("train", lambda d, f: ["--val-rows", "0"], "--val-rows: expected a "),
    "no row to train on": (
        "train",
        lambda d, f: ["--val-rows", "56"],
        "--val-rows: expected fewer than the 56 rows of 8 tokens that the text has, got 56",
    ),
    "long warm-up": (
        "train",
        lambda d, f: ["--optimizer.warmup-steps", "9000"],
        "error: --optimizer.warmup-steps: expected fewer than the 2000 steps",
    ),
    "heads that do not divide": (
        "train",
        lambda d, f: [
            *["--preset", "rwkv6", "--text", write(d / "t", b"abc " * 999)],
            *["--model.features", "30"],
        ],
        "error: --model.head-size: expected a divisor of features=30, got 64",
    ),
    "warm-up beyond the epochs": (
        "train",
        lambda d, f: ["--optimizer.warmup-steps", "50", "--num-epochs", "1"],
        "error: --optimizer.warmup-steps: expected fewer than the 13 steps",
    ),
    "weights that are not there": (
        "train",
        lambda d, f: ["--init", str(d / "no.safetensors")],
        "no.safetensors: No such file or directory\n",
    ),
    "negative seed": ("train", lambda d, f: ["--seed", "-1"], "--seed: expected 0"),
    "rate of NaN": (
        "train",
        lambda d, f: ["--optimizer.learning-rate", "nan"],
        "--optimizer.learning-rate: expected a finite number, got nan",
    ),
    "vocabulary of another size": (
        "train",
        lambda d, f: ["--model.vocab-size", "7"],
        "--model.vocab-size: expected at least 20, the vocabulary's characters, got 7",
    ),
    "wide window": (
        "train",
        lambda d, f: ["--window", "9"],
        "--window: expected at most the model's context_length 8, got 9",
    ),
    "folder of another run": (
        "train",
        lambda d, f: ["--out", str(f), "--seed", "7"],
        "has a run with another eval_batches, seed (use --resume to continue it)",
    ),
    "folder in use": (
        "train",
        lambda d, f: ["--out", str(Path(write(d / "notes", b"x")).parent)],
        "the folder is not empty and holds no run",
    ),
    "path that is a pattern": (
        "train",
        lambda d, f: ["--out", str(d / "run[1]")],
        "run paths must not contain *, ?, [ or \\, got [",
    ),
    "path that orbax takes apart": (
        "train",
        lambda d, f: ["--out", str(d / "a\\b")],
        "run paths must not contain *, ?, [ or \\, got \\",
    ),
    "path that is no text": (
        "train",
        lambda d, f: ["--out", str(d / os.fsdecode(b"\xff"))],
        ": expected a path in UTF-8",
    ),
    "changed text": (
        "train",
        lambda d, f: ["--resume", str(f), "--text", write(d / "t", (ALL_WORK + "a").encode())],
        "(--allow-changed-text continues with this one, --out starts a new run)",
    ),
    "preset of a run": (
        "train",
        lambda d, f: ["--resume", str(f), "--preset", "all-work"],
        "--preset: a run is resumed with its own config",
    ),
    "resume nothing": ("train", lambda d, f: ["--resume", str(d)], "not the folder of a run"),
    "resume elsewhere": (
        "train",
        lambda d, f: ["--resume", str(f), "--out", str(d / "o")],
        "--out: a run is resumed in its own folder",
    ),
    "resume into the past": (
        "train",
        lambda d, f: ["--resume", str(f), "--num-steps", "5"],
        "--num-steps: the run has already done 2000 steps",
    ),
    "resume without a folder": ("train", lambda d, f: ["--resume"], "--resume"),
    "resume another model": (
        "train",
        lambda d, f: ["--resume", str(f), "--model.cell", "gru"],
        "cannot change model.cell of a run",
    ),
    "no run": ("generate", lambda d, f: ["--run", str(d)], "it has no config.json"),
    "damaged config": (
        "generate",
        lambda d, f: ["--run", damaged(f, d / "r", "config.json", '{"model"')],
        "config.json is damaged: ",
    ),
    "damaged vocabulary": (
        "generate",
        lambda d, f: ["--run", damaged(f, d / "r", "vocabulary.json", "5")],
        "vocabulary.json is damaged: expected a JSON object",
    ),
    "config of no model": (
        "generate",
        lambda d, f: [
            "--run",
            damaged(
                f,
                d / "r",
                "config.json",
                (f / "config.json").read_text().replace('"rnn"', '"foo"'),
            ),
        ],
        "cell: expected one of",
    ),
    "neither run nor weights": (
        "generate",
        lambda d, f: [],
        "expected exactly one of --run and --weights",
    ),
    "run and weights": (
        "generate",
        lambda d, f: ["--run", str(f), "--weights", "a.pth"],
        "expected exactly one of --run and --weights",
    ),
    "text and tokens": (
        "generate",
        lambda d, f: ["--run", str(f), "--prompt", "1", "--prompt-tokens", "1"],
        "expected at most one of --prompt and --prompt-tokens",
    ),
    "weights without a prompt": (
        "generate",
        lambda d, f: ["--weights", "a.pth"],
        "--weights: expected with --prompt or --prompt-tokens",
    ),
    "no weights": (
        "generate",
        lambda d, f: ["--weights", str(d / "a.pth"), "--prompt", "x"],
        "a.pth: No such file or directory",
    ),
    "no safetensors": (
        "generate",
        lambda d, f: ["--weights", str(d / "a.safetensors"), "--prompt", "x"],
        "a.safetensors: No such file or directory\n",
    ),
    "weights in a damaged file": (
        "generate",
        lambda d, f: ["--weights", write(d / "a.safetensors", b"{}"), "--prompt", "x"],
        "a.safetensors: ",
    ),
    "weights of another model": (
        "generate",
        lambda d, f: ["--weights", str(f / "twin.safetensors"), "--prompt", "x"],
        "silero-VAD, RWKV, got embedding.weight, layer_norm.bias, layer_norm.weight, …",
    ),
    "text for an unknown vocabulary": (
        "generate",
        lambda d, f: ["--weights", rwkv(d), "--prompt", "x"],
        "expected a model of RWKV's World vocabulary (65536 tokens), got one of 30",
    ),
    "a token that is no number": (
        "generate",
        lambda d, f: ["--weights", rwkv(d), "--prompt-tokens", "3 x"],
        "--prompt-tokens: expected integers from 0 on, got 'x'",
    ),
    "blank tokens": (
        "generate",
        lambda d, f: ["--weights", "a.pth", "--prompt-tokens", " "],
        "--prompt-tokens: expected at least one token",
    ),
    "a token beyond int32": (
        "generate",
        lambda d, f: ["--weights", rwkv(d), "--prompt-tokens", "99999999999"],
        "expected values in 0 … 29, got [99999999999]",
    ),
    "a token outside the vocabulary": (
        "generate",
        lambda d, f: ["--weights", rwkv(d), "--prompt-tokens", "3 30"],
        "expected values in 0 … 29, got [30]",
    ),
    "large seed": (
        "generate",
        lambda d, f: ["--run", str(f), "--seed", "9" * 20],
        "--seed: expected 0",
    ),
    "no tokens": (
        "evaluate",
        lambda d, f: ["--run", str(f), "--num-tokens", "0"],
        "--num-tokens: expected a positive integer, got 0",
    ),
    "no checkpoint": (
        "evaluate",
        lambda d, f: ["--run", damaged(f, d / "r", "checkpoints", None)],
        "not the folder of a run: it has no checkpoints",
    ),
    "rate of dropout": (
        "train",
        lambda d, f: ["--model.dropout-rate", "2"],
        "error: --model.dropout-rate: expected 0 ≤ rate < 1, got 2.0",
    ),
    "batch beyond int32": (
        "train",
        lambda d, f: ["--batch-size", "9" * 20],
        "error: --batch-size: expected at most 268435455",
    ),
    "model beyond int32": (
        "train",
        lambda d, f: ["--model.hidden-features", "9" * 20],
        "error: --model.hidden-features: expected at most 268435455",
    ),
    "resume another preset": (
        "train",
        lambda d, f: ["--resume", str(f), "--preset", "gru"],
        "--preset: a run is resumed with its own config",
    ),
    "greedy and top-k": (
        "generate",
        lambda d, f: ["--run", str(f), "--greedy", "--top-k", "3"],
        "--greedy: expected without --temperature and --top-k",
    ),
    "text of unknown characters": (
        "evaluate",
        lambda d, f: ["--run", str(f), "--text", write(d / "t", b"Zoe " * 99)],
        "--text: not in the vocabulary: 'Z'",
    ),
    "file to export over": (
        "export",
        lambda d, f: ["--run", str(f), "--out", str(f / "config.json")],
        "config.json exists already; choose a new name",
    ),
    "config of half a step": (
        "evaluate",
        lambda d, f: [
            "--run",
            damaged(
                f,
                d / "r",
                "config.json",
                (f / "config.json").read_text().replace('"num_steps": 2000', '"num_steps": 2.5'),
            ),
        ],
        "num_steps: expected a positive integer, got 2.5",
    ),
    "unknown characters": (
        "generate",
        lambda d, f: ["--run", str(f), "--prompt", "Zoë"],
        "--prompt: not in the vocabulary: 'Z', 'ë'",
    ),
    "empty prompt": ("generate", lambda d, f: ["--run", str(f), "--prompt", ""], "--prompt: expe"),
    "top-k of none": ("generate", lambda d, f: ["--run", str(f), "--top-k", "0"], "--top-k: ex"),
    "no folder to export to": (
        "export",
        lambda d, f: ["--run", str(f), "--out", str(d / "no" / "w")],
        "No such file or directory",
    ),
    "folder to export to": (
        "export",
        lambda d, f: ["--run", str(f), "--out", str(d)],
        "Is a directory",
    ),
    "folder for a report": (
        "parity",
        lambda d, f: ["--case", "GRUScratch", "--json", str(d)],
        "Is a directory",
    ),
    "folder for a page": (
        "parity",
        lambda d, f: ["--case", "GRUScratch", "--html", str(d)],
        "Is a directory",
    ),
    "unknown case": ("parity", lambda d, f: ["--case", "nix"], "--case: no case has nix"),
    "unknown case beside a known one": (
        "parity",
        lambda d, f: ["--case", "RNNDeep", "--case", "nix"],
        "--case: no case has nix",
    ),
    "unknown case, with files": (
        "parity",
        lambda d, f: ["--case", "nix", "--json", str(d / "a.json"), "--html", str(d / "a.html")],
        "--case: no case has nix",
    ),
    "one file for two": (
        "parity",
        lambda d, f: ["--json", str(d / "a"), "--html", f"{d}/../{d.name}/a"],
        "expected a file of its own for the page",
    ),
    "no folder for a page": (
        "parity",
        lambda d, f: ["--json", str(d / "a.json"), "--html", str(d / "no" / "a.html")],
        "--html: ",
    ),
    "case of another platform": (
        "parity",
        lambda d, f: ["--case", "1 layer by cuDNN", "--platform", "cpu"],
        "--case: these run on gpu only, not on cpu: torch.nn.LSTM, 1 layer by cuDNN",
    ),
    "missing platform": ("parity", lambda d, f: ["--platform", "tpu"], "this machine has no tpu"),
    **{
        f"{name} for a record": (
            "parity",
            lambda d, f, content=content: [
                *["--case", "RNNDeep", "--compare"],
                write(d / "r.json", content),
            ],
            "r.json: not a record of --json",
        )
        for name, content in {
            "nothing": b"",
            "text": b"hello",
            "bytes": b"\xff\xfe\x00",
            "another JSON": b'[{"loss": 3}]',
            "a number": b"3",
        }.items()
    },
    "folder for a record": (
        "parity",
        lambda d, f: ["--case", "RNNDeep", "--compare", str(d)],
        "--compare: ",
    ),
    "no record": (
        "parity",
        lambda d, f: ["--case", "RNNDeep", "--compare", str(d / "none.json")],
        "none.json: No such file or directory",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_in_one_line(name, finished, tmp_path, capsys):
    command, args, message = REFUSED[name]
    before = sorted(finished.rglob("*"))
    given = args(tmp_path, finished)
    files = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as stop, one_line_errors("prog"):
        COMMANDS[command](given)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("prog: error: ")
    assert message in error
    assert error.count("\n") == 1
    assert sorted(finished.rglob("*")) == before
    assert sorted(tmp_path.rglob("*")) == files


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
