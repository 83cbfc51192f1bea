"""`twinscan parity FILE.py`: pairs that a file defines."""

import re
import signal
import subprocess
import sys
import time

import pytest

from parity_tests.report.command import main
from parity_tests.report.record import Record
from twinscan.command_line import CommandLineError

pytestmark = pytest.mark.usefixtures("standard_promotion")

HEAD = """
import numpy as np
import torch
from helper_of_pairs import linear
from parity_tests import Pair

twin = torch.nn.Linear(3, 4)
x = np.random.default_rng(0).standard_normal((2, 3))


def pair(factor, **options):
    return Pair(twin, lambda w, x: factor * linear(w, x), x, weights=dict, **options)


"""
PAIRS = """
plain = pair(1.0, dtypes=["float32"])
_hidden = pair(2.0)


def lazy() -> Pair:
    return pair(1.0)


def of_an_argument(factor) -> Pair:
    raise RuntimeError("is no pair")


def another():
    raise RuntimeError("is no pair")
"""
FAULTS = """
def off() -> "Pair":
    return pair(1.001)


def broken() -> Pair:
    return Pair(twin, lambda w, x: x + np.ones((5, 5)), x, weights=dict)


def unmade() -> Pair:
    raise LookupError("no [checkpoint] of\\nmine")


def none() -> Pair:
    return twin
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "helper_of_pairs.py").write_text(
        "def linear(weights, x):\n    return x @ weights['weight'].T + weights['bias']\n"
    )
    (tmp_path / "pairs.py").write_text(HEAD + PAIRS)
    return tmp_path / "pairs.py"


@pytest.fixture(autouse=True)
def paths(monkeypatch):
    """The folder that the command adds to the path of modules is taken away again."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_each_pair_is_compared(file, tmp_path, capsys):
    assert main([str(file), "--json", str(tmp_path / "x.json")]) == 0
    record = Record.from_json((tmp_path / "x.json").read_text())
    assert record.cases == {"plain": "Linear", "lazy": "Linear"}
    assert [(m.case, m.dtype) for m in record.measurements if m.group == "outputs"] == [
        ("plain", "float32"),
        ("lazy", "float64"),
        ("lazy", "float32"),
    ]
    assert capsys.readouterr().out.count("pass") == 3


def test_a_pair_that_fails_ends_with_1_and_keeps_no_other_from_running(file, tmp_path, capsys):
    file.write_text(HEAD + FAULTS + PAIRS)
    args = [str(file), "--locate", "--json", str(tmp_path / "x.json")]
    args += ["--html", str(tmp_path / "x.html")]
    assert main(args) == 1
    record = Record.from_json((tmp_path / "x.json").read_text())
    assert record.failing == {"off", "broken", "unmade", "none"}
    assert {"plain", "lazy"} < record.cases.keys()
    line = 1 + (HEAD + FAULTS).splitlines().index(
        '    raise LookupError("no [checkpoint] of\\nmine")'
    )
    printed = capsys.readouterr().out
    assert f"FAIL unmade, cpu: LookupError: no [checkpoint] of (line {line})" in printed
    assert "FAIL none, cpu: TypeError:" in printed
    assert "FAIL off, cpu, float64, outputs: worst in y" in printed
    assert re.search(r"broken, cpu: TypeError: add got .* \(line \d+\)", "\n".join(record.faults))
    assert "LookupError: no [checkpoint] of" in (tmp_path / "x.html").read_text()


def test_options_take_the_places_of_the_pairs_own(file, tmp_path):
    args = [str(file), "--dtypes", "bfloat16", "--case", "AZ", "--json", str(tmp_path / "x.json")]
    assert main(args) == 0
    record = Record.from_json((tmp_path / "x.json").read_text())
    assert {(m.case, m.dtype) for m in record.measurements} == {("lazy", "bfloat16")}
    assert main([*args, "--compare", str(tmp_path / "x.json")]) == 0


REFUSED = [
    (None, "No such file or directory"),
    ("x = 1\nmissing(x)", r"^{file}: NameError: .* \(line 2\)$"),
    ("import json\n\njson.loads('[')", r"JSONDecodeError: .* \(line 3\)$"),
    ("x = 1\nfor\n", r"^{file}: SyntaxError: .* \(line 2\)$"),
    ("import sys\nsys.exit('no data')", r"^{file}: SystemExit: no data \(line 2\)$"),
    ("import parity_tests\nparity_tests.Pair(None, None, weigths=dict)", r"weigths.*\(line 2\)$"),
    ("def pair(): pass", "^{file}:"),
    (HEAD + PAIRS, "^--case: .* has no pair with nix in its name"),
]


@pytest.mark.parametrize(("content", "message"), REFUSED)
def test_a_file_without_pairs_is_refused_in_one_line(content, message, file, tmp_path):
    file.unlink()
    if content is not None:
        file.write_text(content)
    with pytest.raises((CommandLineError, OSError), match=message.format(file=file)) as refused:
        main([str(file), "--case", "nix", "--json", str(tmp_path / "x.json")])
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "x.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_leaves_no_file(file, tmp_path, by):
    waits = "import time, pathlib\n\ndef slow() -> Pair:\n    pathlib.Path('here').touch()\n"
    file.write_text(f"{HEAD}{waits}    time.sleep(600)\n")
    child = subprocess.Popen(
        [sys.executable, "-m", "twinscan", "parity", file.name, "--json", "x", "--html", "y"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "here").exists():
        assert child.poll() is None
        time.sleep(0.05)
    child.send_signal(by)
    _, error = child.communicate(timeout=60)
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {
        "here",
        "helper_of_pairs.py",
        "pairs.py",
    }
    if by == signal.SIGINT:
        assert child.returncode == 130
        assert "twinscan parity: interrupted" in error.splitlines()
        assert "Traceback" not in error
