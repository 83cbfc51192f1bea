"""Runs from the command line to the folder and back."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import chex
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.torch import load_file

import parity_tests.__main__ as parity_command
import torch_ref
import train.__main__ as train_command
from train import evaluate, export, generate
from train.command_line import CommandLineError, one_line_errors
from train.run import Run
from train.text import ALL_WORK, Vocabulary, batches, read_text

SHAKESPEARE = Path(__file__).parents[2] / "shared" / "data" / "tinyshakespeare.txt"
COMMANDS = {
    "train": train_command.main,
    "generate": generate.main,
    "evaluate": evaluate.main,
    "export": export.main,
    "parity": parity_command.main,
}


def start(folder: Path, *args: str) -> Run:
    train_command.main(["--out", str(folder), "--eval-batches", "20", *args])
    return Run.open(folder)


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """The folder of the seed's experiment, run to its end."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    start(folder)
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "input.txt"
    path.write_text("Füße, naïve café — the quick brown fox.\n" * 60, encoding="utf-8")
    return path


def small(text: Path, *args: str) -> list[str]:
    """A small LSTM on a text."""
    options = "--preset lstm --model.hidden-features 16 --window 12 --batch-size 8 --eval-every 5"
    return [*options.split(), "--num-steps", "10", "--text", str(text), *args]


def test_seed_experiment_reaches_the_seeds_loss(finished):
    metrics = Run.open(finished).metrics()
    assert [record["step"] for record in metrics] == list(range(0, 2001, 100))
    assert 2.8 < metrics[0]["train"] < 3.6
    assert metrics[-1]["train"] < 0.18
    assert metrics[-1]["val"] < 0.19
    assert (finished / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_generates_the_sentence(finished, capsys):
    generate.main(
        ["--run", str(finished), "--greedy", "--prompt", "All work", "--num-tokens", "60"]
    )
    assert "All work and no play makes Jack a doll boy." in capsys.readouterr().out


def test_generation_repeats_with_its_seed(finished, capsys):
    texts = []
    for seed in ("1", "1", "2"):
        generate.main(["--run", str(finished), "--seed", seed, "--top-k", "5"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_evaluates_on_the_whole_text(finished, capsys):
    evaluate.main(["--run", str(finished)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["train", "val"]
    assert all(0.1 < float(line.split()[1]) < 0.3 for line in lines)


def test_exported_weights_are_the_twins(finished, tmp_path, capsys):
    path = tmp_path / "weights.safetensors"
    export.main(["--run", str(finished), "--out", str(path)])
    difference = float(capsys.readouterr().out.split("logits: ")[1])
    twin = torch_ref.RNNLanguageModel()
    twin.load_state_dict(load_file(path))
    tokens = Vocabulary.of(ALL_WORK).encode("All work")
    logits, _ = twin(torch.tensor(tokens)[None].long())
    ours, _ = Run.open(finished).model()(tokens[None])
    np.testing.assert_allclose(ours, logits.detach(), rtol=0, atol=10 * difference)
    assert 0 < difference < 1e-4


@pytest.mark.parametrize("cell", ["rnn", "lstm", "gru"])
def test_every_cell_trains_and_exports(text_file, tmp_path, capsys, cell):
    start(tmp_path / "run", *small(text_file, "--preset", cell, "--model.num-layers", "2"))
    out = capsys.readouterr().out
    assert float(out.split("twin's logits: ")[1].split()[0]) < 1e-4
    generate.main(["--run", str(tmp_path / "run"), "--prompt", "naïve café"])
    assert capsys.readouterr().out.startswith("naïve café")


@pytest.mark.parametrize(
    ("preset", "sizes"),
    [
        ("hawk", "--model.features 12 --model.mlp-features 16 --model.kernel-size 2"),
        ("rwkv", "--model.features 12 --model.hidden-features 16"),
    ],
)
def test_every_linear_recurrence_trains_resumes_and_exports(
    text_file, tmp_path, capsys, preset, sizes
):
    small = "--model.num-layers 2 --window 12 --batch-size 8 --eval-every 5 --num-steps 10"
    constant = "--optimizer.schedule constant --optimizer.warmup-steps 0"
    options = ["--preset", preset, "--text", str(text_file), *f"{sizes} {small} {constant}".split()]
    whole = start(tmp_path / "whole", *options)
    start(tmp_path / "cut", *options, "--num-steps", "6")
    train_command.main(["--resume", str(tmp_path / "cut"), "--num-steps", "10"])
    chex.assert_trees_all_equal(params(whole), params(Run.open(tmp_path / "cut")))
    out = capsys.readouterr().out
    assert float(out.split("twin's logits: ")[1].split()[0]) < 1e-4
    generate.main(["--run", str(tmp_path / "whole"), "--prompt", "naïve café"])
    assert capsys.readouterr().out.startswith("naïve café")


def test_resuming_gives_the_weights_of_one_run(text_file, tmp_path):
    dropout = ["--model.num-layers", "2", "--model.dropout-rate", "0.3"]
    constant = ["--optimizer.schedule", "constant"]
    whole = start(tmp_path / "whole", *small(text_file, *dropout, *constant))
    start(tmp_path / "cut", *small(text_file, *dropout, *constant, "--num-steps", "6"))
    with_start = (tmp_path / "cut" / "metrics.jsonl").read_text()
    train_command.main(["--resume", str(tmp_path / "cut"), "--num-steps", "10"])
    resumed = Run.open(tmp_path / "cut")
    assert resumed.config.num_steps == 10
    assert (tmp_path / "cut" / "metrics.jsonl").read_text().startswith(with_start)
    chex.assert_trees_all_equal(params(whole), params(resumed))


def test_a_cosine_ends_where_it_was_to_end(text_file, tmp_path):
    start(tmp_path / "run", *small(text_file))
    with pytest.raises(CommandLineError, match="schedule ends at step 10"):
        train_command.main(["--resume", str(tmp_path / "run"), "--num-steps", "20"])


def test_a_killed_run_is_resumed(text_file, tmp_path):
    """Killed between evaluations, with half a line in its metrics."""
    whole = start(tmp_path / "whole", *small(text_file))
    args = small(text_file, "--num-steps", "100000", "--optimizer.schedule", "constant")
    folder = ["--out", str(tmp_path / "cut"), "--eval-batches", "20"]
    with subprocess.Popen(
        [sys.executable, "-m", "train", *folder, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as killed:
        assert killed.stdout is not None
        for line in killed.stdout:
            if line.split()[:1] == ["30"]:
                break
        killed.kill()
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"step": ')
    run = Run.open(tmp_path / "cut")
    latest = run.checkpoints.latest_step
    run.checkpoints.close()
    assert latest is not None
    assert latest >= 20
    train_command.main(["--resume", str(tmp_path / "cut"), "--num-steps", str(latest + 500)])
    metrics = Run.open(tmp_path / "cut").metrics()
    assert metrics[-1]["step"] == latest + 500
    assert metrics[-1]["train"] < whole.metrics()[-1]["train"]


def params(run: Run) -> nnx.State:
    return nnx.state(run.model(), nnx.Param)


def test_bfloat16_trains(text_file, tmp_path):
    run = start(tmp_path / "run", *small(text_file, "--dtype", "bfloat16", "--num-steps", "60"))
    metrics = run.metrics()
    assert metrics[-1]["train"] < metrics[0]["train"] - 0.3


def test_eight_devices_train_as_one(text_file, tmp_path):
    code = """
import sys, jax
jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
import train.__main__ as command
command.main(sys.argv[2:])
assert jax.device_count() == int(sys.argv[1])
"""
    losses = []
    for devices in ("1", "8"):
        folder = tmp_path / devices
        args = small(text_file, "--out", str(folder), "--eval-batches", "2")
        subprocess.run(
            [sys.executable, "-c", code, devices, *args],
            check=True,
            capture_output=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        losses.append([record["val"] for record in Run.open(folder).metrics()])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert losses[0][-1] < losses[0][0]


def test_batches_are_windows_in_an_order_of_their_seed():
    tokens = np.arange(100, dtype=np.int32)
    loader = batches(tokens, window=7, batch_size=4, seed=1)
    rows = np.concatenate([loader[i] for i in range(300)])
    assert (np.diff(rows, axis=1) == 1).all()
    assert set(rows[:, 0]) == set(range(93))
    again = batches(tokens, window=7, batch_size=4, seed=1)
    np.testing.assert_array_equal(again[299], loader[299])
    assert (batches(tokens, window=7, batch_size=4, seed=2)[0] != loader[0]).any()


def test_every_character_is_a_token():
    text = "añ\U0001f600b\r\n\t"
    vocabulary = Vocabulary.of(text)
    assert vocabulary.decode(vocabulary.encode(text)) == text
    assert len(vocabulary) == len(set(text))


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="the text is not part of the repository")
def test_tiny_shakespeare_is_learned_from_the_start(tmp_path):
    run = start(tmp_path / "run", *small(SHAKESPEARE, "--num-steps", "60", "--eval-every", "60"))
    assert run.metrics()[-1]["val"] < 3.2
    assert len(run.vocabulary) == 65


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def damaged(finished: Path, folder: Path, name: str, content: str | None) -> str:
    shutil.copytree(finished, folder)
    if content is None:
        shutil.rmtree(folder / name)
    else:
        (folder / name).write_text(content)
    return str(folder)


REFUSED = {
    "missing text": ("train", lambda d, f: ["--text", str(d / "no.txt")], "no.txt: No such file"),
    "folder for a text": ("train", lambda d, f: ["--text", str(d)], "Is a directory"),
    "empty text": ("train", lambda d, f: ["--text", write(d / "e", b"")], "the file is empty"),
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
    "unknown preset": ("train", lambda d, f: ["--preset", "nix"], "invalid choice 'nix'"),
    "unknown option": ("train", lambda d, f: ["--nix", "3"], "Unrecognized options: --nix"),
    "word for a number": ("train", lambda d, f: ["--num-steps", "x"], "--num-steps: invalid"),
    "no steps": ("train", lambda d, f: ["--num-steps", "0"], "--num-steps: expected at least 1"),
    "long warm-up": (
        "train",
        lambda d, f: ["--optimizer.warmup-steps", "9000"],
        "warmup_steps: expected at least 0 and fewer than the 2000 steps",
    ),
    "negative seed": ("train", lambda d, f: ["--seed", "-1"], "--seed: expected 0"),
    "rate of NaN": (
        "train",
        lambda d, f: ["--optimizer.learning-rate", "nan"],
        "learning_rate: expected a positive number, got nan",
    ),
    "vocabulary of another size": (
        "train",
        lambda d, f: ["--model.vocab-size", "77"],
        "--model.vocab-size: the text has 20 distinct characters, got 77",
    ),
    "wide window": (
        "train",
        lambda d, f: ["--window", "9"],
        "--window: expected at most --model.context-length 8, got 9",
    ),
    "folder in use": ("train", lambda d, f: ["--out", str(f)], "the folder is not empty"),
    "resume nothing": ("train", lambda d, f: ["--resume", str(d)], "not the folder of a run"),
    "resume elsewhere": (
        "train",
        lambda d, f: ["--resume", str(f), "--out", str(d / "o")],
        "--out: a run is resumed in its own folder",
    ),
    "resume into the past": (
        "train",
        lambda d, f: ["--resume", str(f), "--num-steps", "5"],
        "--num-steps: the run has done 2000 steps already",
    ),
    "resume without a folder": ("train", lambda d, f: ["--resume"], "--resume"),
    "resume another model": (
        "train",
        lambda d, f: ["--resume", str(f), "--model.cell", "gru"],
        "cannot change model of a run",
    ),
    "no run": ("generate", lambda d, f: ["--run", str(d)], "it has no config.json"),
    "damaged config": (
        "generate",
        lambda d, f: ["--run", damaged(f, d / "r", "config.json", '{"model"')],
        "damaged config or vocabulary",
    ),
    "damaged vocabulary": (
        "generate",
        lambda d, f: ["--run", damaged(f, d / "r", "vocabulary.json", "5")],
        "damaged config or vocabulary",
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
    "large seed": (
        "generate",
        lambda d, f: ["--run", str(f), "--seed", "9" * 20],
        "--seed: expected 0",
    ),
    "no checkpoint": (
        "evaluate",
        lambda d, f: ["--run", damaged(f, d / "r", "checkpoints", None)],
        "the run has no complete checkpoint",
    ),
    "unknown characters": (
        "generate",
        lambda d, f: ["--run", str(f), "--prompt", "Zoë"],
        "not in the vocabulary: 'Z', 'ë'",
    ),
    "empty prompt": ("generate", lambda d, f: ["--run", str(f), "--prompt", ""], "--prompt: expe"),
    "top-k of none": ("generate", lambda d, f: ["--run", str(f), "--top-k", "0"], "top_k: expec"),
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
    "unknown case": ("parity", lambda d, f: ["--case", "nix"], "--case: no case has nix"),
    "missing platform": ("parity", lambda d, f: ["--platform", "tpu"], "this machine has no tpu"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_in_one_line(name, finished, tmp_path, capsys):
    command, args, message = REFUSED[name]
    before = sorted(finished.rglob("*"))
    with pytest.raises(SystemExit) as stop, one_line_errors("prog"):
        COMMANDS[command](args(tmp_path, finished))
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("prog: error: ")
    assert message in error
    assert error.count("\n") == 1
    assert sorted(finished.rglob("*")) == before


def test_a_module_ends_with_code_2_and_no_traceback():
    done = subprocess.run(
        [sys.executable, "-m", "train", "--text", "no-such-file.txt"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == ("python -m train: error: no-such-file.txt: No such file or directory\n")


def test_parity_report(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert parity_command.main(["--case", "RNNScratch tanh", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert len(record["measurements"]) == 12
    assert all(m["passed"] and m["jax_error"] > 0 for m in record["measurements"])
    assert "tpu: not on this machine" in capsys.readouterr().out


def test_parity_report_fails_where_a_case_fails(monkeypatch, capsys):
    from parity_tests import tolerance

    monkeypatch.setattr(tolerance, "FLOAT64", 0.0)
    assert parity_command.main(["--case", "RNNScratch tanh"]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_read_text_of_nothing_is_the_seeds():
    text = read_text(None)
    assert (len(text), len(set(text))) == (451, 20)
    with pytest.raises(CommandLineError):
        read_text(Path("no-such-file.txt"))
