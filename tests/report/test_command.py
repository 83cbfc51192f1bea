"""`twinscan parity`: reports of cases, of pairs that a file defines, and of runs in pieces."""

import json
import re
import sys

import pytest

from parity_tests.registry import MUTATIONS
from parity_tests.report import command
from parity_tests.report.command import UNFINISHED, main
from parity_tests.report.record import Record
from twinscan.command_line import CommandLineError, one_line_errors
from twinscan.heartbeat import heartbeat

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
    """Restores the path of modules, to which the command adds a folder."""
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


def test_a_slow_pair_is_named_while_it_is_compared(file, monkeypatch, capsys):
    monkeypatch.setattr("twinscan.heartbeat.SECONDS", 0.005)
    with heartbeat():
        assert main([str(file)]) == 0
    assert re.search(r"^comparing 2 of 2: lazy( \(\d+ s so far\))?$", capsys.readouterr().err, re.M)


INTEGERS = """
class Signs(torch.nn.Module):
    def forward(self, x):
        return (x > 0).long()


{name} = Pair(Signs(), lambda weights, x: (x {comparison} 0).astype(int), x, weights=dict)
"""


@pytest.mark.parametrize(
    ("name", "comparison", "verdict"), [("same", ">", "pass"), ("other", "<", "FAIL")]
)
def test_integers_have_a_row_that_agrees_with_the_exit_code(
    name, comparison, verdict, file, capsys
):
    file.write_text(HEAD + INTEGERS.format(name=name, comparison=comparison))
    assert main([str(file)]) == (verdict == "FAIL")
    printed = capsys.readouterr().out
    assert re.search(rf"^│ {name} .* {verdict} +│$", printed, re.M)
    assert (f"FAIL {name}, cpu: outputs" in printed) == (verdict == "FAIL")


def test_options_take_the_places_of_the_pairs_own(file, tmp_path):
    args = [str(file), "--dtypes", "bfloat16", "--case", "AZ", "--json", str(tmp_path / "x.json")]
    assert main(args) == 0
    record = Record.from_json((tmp_path / "x.json").read_text())
    assert {(m.case, m.dtype) for m in record.measurements} == {("lazy", "bfloat16")}
    assert main([*args, "--compare", str(tmp_path / "x.json")]) == 0


REFUSED = [
    (None, "No such file or directory"),
    ("import json\n\njson.loads('[')", r"JSONDecodeError: .* \(line 3\)$"),
    ("x = 1\nfor\n", r"^{file}: SyntaxError: .* \(line 2\)$"),
    ("import sys\nsys.exit('no data')", r"^{file}: SystemExit: no data \(line 2\)$"),
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


def test_a_stopped_run_leaves_no_file(file, tmp_path, monkeypatch, capsys):
    file.write_text(f"{HEAD}\n\ndef stopped() -> Pair:\n    raise KeyboardInterrupt\n")
    monkeypatch.chdir(tmp_path)
    before = {*tmp_path.iterdir()}
    with pytest.raises(SystemExit) as stop, one_line_errors("prog"):
        main([str(file), "--json", "x", "--html", "y"])
    assert stop.value.code == 130
    assert "prog: interrupted" in capsys.readouterr().err.splitlines()
    assert {path for path in tmp_path.iterdir() if path.name != "__pycache__"} == before


ASKED = ["--case", "CausalConv1D, kernel 4", "--precision", "--mutations"]
A_MOMENT = ["--minutes", "0.0001"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The record of a run that was not interrupted."""
    path = tmp_path_factory.mktemp("whole") / "whole.json"
    assert main([*ASKED, "--json", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.mark.slow
def test_pieces_are_the_whole(whole, tmp_path, capsys):
    path, page, calls = tmp_path / "pieces.json", tmp_path / "pieces.html", 1
    args = [*ASKED, *A_MOMENT, "--json", str(path), "--html", str(page)]
    while (code := main(args)) == UNFINISHED:
        assert len(json.loads(path.read_text())["done"]) == calls
        assert not page.exists()
        calls += 1
    assert code == 0
    assert json.loads(path.read_text()) == whole
    assert whole["done"] == []
    assert calls == 3 * len(whole["cases"]) + len(whole["mutations"]) > 4
    assert page.exists()
    assert f"stopped after 0.0001 minutes: 1 of {calls} measurements are in" in (
        capsys.readouterr().err
    )
    assert main(args) == UNFINISHED, "a finished record is measured anew"


@pytest.mark.slow
def test_what_a_killed_run_measured_is_kept(whole, tmp_path, monkeypatch):
    path = tmp_path / "killed.json"
    args = [*ASKED, "--minutes", "9", "--json", str(path)]
    with monkeypatch.context() as patched:
        patched.setattr(command, "measure_over_time", interrupt)
        with pytest.raises(KeyboardInterrupt):
            main(args)
    assert len(Record.from_json(path.read_text()).done) == 2 * len(whole["cases"])
    with monkeypatch.context() as patched:
        patched.setattr(command, "measure_twin", lambda *_: pytest.fail("it was measured"))
        assert main(args) == 0
    assert json.loads(path.read_text()) == whole


def interrupt(*_):
    raise KeyboardInterrupt


def test_an_interrupted_run_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "measure_twin", interrupt)
    for more in ([], ["--minutes", "9"]):
        with pytest.raises(KeyboardInterrupt):
            main([*ASKED, "--json", str(tmp_path / "x.json"), *more])
        assert not [*tmp_path.iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize("change", ["versions", "cases", "damage"])
def test_a_different_record_is_not_resumed(change, tmp_path):
    path = tmp_path / "other.json"
    args = [*A_MOMENT, "--json", str(path)]
    assert main([*ASKED, *args]) == UNFINISHED
    first = json.loads(path.read_text())
    if change == "versions":
        path.write_text(json.dumps({**first, "versions": {"jax": "0.1"}}))
    elif change == "damage":
        path.write_text(path.read_text()[:-20])
    asked = ["--case", "GRUScratch"] if change == "cases" else ASKED
    assert main([*asked, *args]) == UNFINISHED
    assert len(json.loads(path.read_text())["done"]) == 1


@pytest.mark.parametrize("args", ["--minutes 9", "--minutes 0 --json x", "--minutes nan --json x"])
def test_minutes_that_cannot_be(args):
    with pytest.raises(CommandLineError, match=r"^--minutes:"):
        main(args.split())


def test_a_report_is_recorded_and_compared(tmp_path, capsys):
    path = tmp_path / "report.json"
    arguments = ["--case", "RNNScratch tanh", "--json", str(path)]
    assert main(arguments) == 0
    record = json.loads(path.read_text())
    assert all(m["verdict"] == "pass" and m["jax_error"] > 0 for m in record["measurements"])
    assert [errors["dtype"] for errors in record["over_time"]] == ["float32", "bfloat16"]
    assert {"cpu: ran", "tpu: not on this machine"} <= {*capsys.readouterr().out.splitlines()}
    assert main([*arguments, "--compare", str(path)]) == 0
    assert "report.json: nothing moved" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.slow
def test_a_report_counts_failures_and_planted_faults(monkeypatch, tmp_path, capsys):
    fault = next(m for m in MUTATIONS if m.case == "RNNScratch tanh" and m.check is None)
    with fault.plant():
        assert main(["--case", "RNNScratch tanh"]) == 1
    assert "FAIL RNNScratch tanh, cpu, float64, outputs: worst in y" in capsys.readouterr().out
    monkeypatch.setattr(command, "is_caught", lambda mutation: mutation.check is None)
    assert main(["--case", "CausalConv1D, kernel 4", "--mutations"]) == 1
    output = capsys.readouterr().out
    assert (
        "MISSED CausalConv1D, kernel 4: lengths forgotten: not caught by padding has no" in output
    )
    assert "planted faults: 1 of 3 caught" in output
