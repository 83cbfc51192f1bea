"""Each example runs, does what it says, and prints what its page shows."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGES = ROOT / "docs" / "examples"
NUMBER = r"-?\d[\d,.]*(e[+-]\d+)?"


def without_numbers(text: str) -> list[str]:
    """The lines of an output, without what may differ from run to run."""
    lines = (re.sub(r", worst in .*", "", line) for line in text.splitlines())
    return [re.sub(r"\s+", " ", re.sub(NUMBER, "0", line)).strip() for line in lines]


def numbers(text: str, pattern: str) -> list[float]:
    """The numbers that the pattern, with one group, finds in an output."""
    return [float(found) for found in re.findall(pattern, text)]


def check_page(name: str, printed: str) -> None:
    """Compares the output that the page shows with what was printed."""
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"```text\n(.*?)```", page, flags=re.DOTALL)
    assert without_numbers(shown) == without_numbers(printed.strip())


@pytest.fixture
def example(tmp_path, monkeypatch, standard_promotion, capfd):
    """Runs the `main` of an example in an empty folder, and returns what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, **arguments) -> str:
        runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](**arguments)
        printed = capfd.readouterr().out
        check_page(name, printed)
        return printed

    yield run
    plt.close("all")


@pytest.mark.slow
def test_tagger(example):
    printed = example("tagger", steps=120)
    forward, both = printed.split("reads in both directions")
    assert numbers(both, r"([\d.]+)% of the tags")[-1] > 97
    assert numbers(forward, r"([\d.]+)% of the tags")[-1] < 95


@pytest.mark.slow
def test_recurrent_ppo(example):
    printed = example("recurrent_ppo")
    recurrent, feed_forward = numbers(printed, r"(-?[\d.]+) at the end")
    assert recurrent > 0.95
    assert abs(feed_forward) < 0.3
    assert Path("recurrent_ppo.png").exists()


@pytest.mark.slow
def test_forecast(example):
    printed = example("forecast", steps=200)
    model, day_before = numbers(printed, r"hours, .*: ([\d.]+)")
    assert model < day_before / 2
    assert Path("forecast.png").exists()


@pytest.mark.slow
def test_own_training_loop(tmp_path):
    """Runs as commands, because JAX cannot change the number of its devices once it has started."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_NUMPY")}
    printed = ""
    for steps in ("100", "200"):
        command = [sys.executable, str(EXAMPLES / "own_training_loop.py"), "--steps", steps]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        printed += done.stdout
    check_page("own_training_loop", printed)
    first, *_, last = numbers(printed, r"loss ([\d.]+)")
    assert last < first / 2


@pytest.mark.slow
def test_port_a_crnn(example):
    wrong, right = example("port_a_crnn").split("epsilon=1e-05:")
    assert "first to depart: cnn.5, forward" in wrong
    assert "eps 1e-05 | epsilon 0.001" in wrong
    assert "FAIL" not in right


@pytest.mark.slow
def test_finetune_pretrained(example):
    printed = example("finetune_pretrained", steps=100)
    assert numbers(printed, r"loss ([\d.]+)")[-1] < 0.1
    assert numbers(printed, r"alone by (.*)")[0] < 1e-4
    assert "8+5=13" in printed


@pytest.mark.slow
def test_finetune_granite(example):
    pytest.importorskip("transformers")
    printed = example("finetune_granite", steps=200)
    assert numbers(printed, r"loss ([\d.]+)")[-1] < 0.1
    answers = re.findall(r"(\d+)=(\d*), .* (\d*)", printed)
    assert len(answers) == 3
    for prompt, answer, by_transformers in answers:
        assert answer == by_transformers == "".join(sorted(prompt))


def test_dreamer_gru(example):
    assert "FAIL" not in example("dreamer_gru")


def test_export_model(example):
    pytest.importorskip("flatbuffers")
    printed = example("export_model")
    assert "imported jax_models or flax: False" in printed
    assert numbers(printed, r"largest difference: (.*)")[0] < 1e-6


@pytest.mark.slow
def test_finetune_silero_vad(example):
    """Trains on a file of recordings, and writes a file that the package loads."""
    pytest.importorskip("silero_vad")
    make_recordings = runpy.run_path(str(EXAMPLES / "finetune_silero_vad.py"))["make_recordings"]
    np.savez("given.npz", **dict(zip(("audio", "labels"), make_recordings(), strict=True)))
    printed = example("finetune_silero_vad", recordings=Path("given.npz"))
    before, after = numbers(printed, r"(\d+)% of")
    assert before < 70
    assert after > 95


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_every_example_has_a_page(path):
    code, page = path.read_text(encoding="utf-8"), PAGES / f"{path.stem}.md"
    assert f"```python\n{code}```" in page.read_text(encoding="utf-8")
    assert f"]({page.name}) |" in (PAGES / "index.md").read_text(encoding="utf-8")
