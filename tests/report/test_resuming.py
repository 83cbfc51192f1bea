"""`--minutes`: a report in pieces is the report in one."""

import json

import pytest

from parity_tests.report import command
from parity_tests.report.command import UNFINISHED, main
from parity_tests.report.record import Record
from twinscan.command_line import CommandLineError

ASKED = ["--case", "RNNScratch", "--case", "CausalConv1D", "--precision", "--mutations"]
A_MOMENT = ["--minutes", "0.0001"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The record of one run."""
    path = tmp_path_factory.mktemp("whole") / "whole.json"
    assert main([*ASKED, "--json", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.mark.slow
def test_pieces_are_the_whole(whole, tmp_path, capsys):
    path, page, calls = tmp_path / "pieces.json", tmp_path / "pieces.html", 1
    command = [*ASKED, *A_MOMENT, "--json", str(path), "--html", str(page)]
    while (code := main(command)) == UNFINISHED:
        assert len(json.loads(path.read_text())["done"]) == calls
        assert not page.exists()
        calls += 1
    assert code == 0
    assert json.loads(path.read_text()) == whole
    assert whole["done"] == []
    assert calls == 3 * len(whole["cases"]) + len(whole["mutations"]) > 8
    assert page.exists()
    assert f"stopped after 0.0001 minutes: 1 of {calls} measurements are in" in (
        capsys.readouterr().err
    )
    assert main(command) == UNFINISHED, "a finished record is measured anew"


@pytest.mark.slow
def test_what_a_killed_run_measured_is_kept(whole, tmp_path, monkeypatch):
    path = tmp_path / "killed.json"
    args = [*ASKED, "--minutes", "9", "--json", str(path)]
    with monkeypatch.context() as patched:
        patched.setattr(command, "over_time", interrupt)
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


@pytest.mark.parametrize("change", ["versions", "cases", "damage"])
def test_a_record_of_something_else_is_not_gone_on_with(change, tmp_path):
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
