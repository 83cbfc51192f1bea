"""The benchmarks' machinery, on shapes of no interest."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from benchmarks import families
from benchmarks.__main__ import run
from benchmarks.compare import Session
from benchmarks.families import gated, limits
from benchmarks.families.gated.problem import Gated
from benchmarks.outcome import Check, Row, check_targets
from benchmarks.problem import BOTH, FORWARD, OURS, LeftOut, Limits, Work
from benchmarks.report.store import read_all
from benchmarks.workers import Burst, timing


def test_a_family_end_to_end(tmp_path, monkeypatch, capsys):
    """Two processes, a JSON file, a plot and a page; peers that cannot take part are named."""
    monkeypatch.setattr(gated, "problems", lambda quick: [Gated("RNN", 5, 2, 4)])
    few = {name: gated.contenders[name] for name in (OURS, "torch.nn", "nnx.RNN", "equinox")}
    monkeypatch.setattr(gated, "contenders", few)
    monkeypatch.setattr(limits, "MATMUL", 64)
    monkeypatch.setattr(limits, "TRIAD", 1024)
    monkeypatch.setattr(Session, "rounds", 1)

    (record,) = run(["gated"], tmp_path, quick=True, platform="cpu")

    rows = {(row.name, row.part): row for row in record.outcome.rows}
    for name, part in itertools.product((OURS, "torch.nn", "nnx.RNN"), (FORWARD, BOTH)):
        row = rows[name, part]
        assert row.ms > 0
        assert row.error < 1e-6
        assert part == FORWARD or row.gradient_error < 1e-6
        assert row.limit_ms > 0
    assert any(name.startswith("equinox") for name in record.outcome.left_out)
    assert {check.what for check in record.outcome.checks} >= {f"{OURS} / torch.nn"}
    assert read_all(tmp_path) == [record]
    assert (tmp_path / "gated-cpu.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "README.md").read_text()
    assert "gated-cpu.png" in page
    assert "RNN T5 B2 H4" in page
    assert json.loads((tmp_path / "gated-cpu.json").read_text())["platform"] == "cpu"
    assert "equinox (RNN T5 B2 H4): left out" in capsys.readouterr().out


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_family_has_what_the_command_needs(name):
    """A title and problems, quick ones fewer; the first contender is ours."""
    module = families.family(name)
    assert families.title(name)
    if name == "compile_time":
        return
    quick, full = module.problems(True), module.problems(False)
    assert len({problem.name for problem in full}) == len(full)
    assert 0 < len(quick) <= len(full)
    assert next(iter(module.contenders)) == OURS
    for problem in full:
        for part in problem.parts:
            against = {"torch", "JAX peer", "limit", *module.contenders}
            assert set(problem.targets(part, "cpu")) <= against


def row(name: str, ms: float, framework="jax", **fields) -> Row:
    return Row("p", FORWARD, name, framework, ms, **fields)


def test_targets_are_against_the_fastest_peer_that_computes_the_same():
    rows = [
        row(OURS, 2.0, limit_ms=1.0),
        row(f"{OURS}, variant", 0.1),
        row("slow", 8.0),
        row("fast", 4.0),
        row("other", 1.0, error=0.1),
        row("torch", 1.0, "torch"),
    ]
    checks = check_targets(rows, {"JAX peer": 0.5, "torch": 1.9, "limit": 0.6, "absent": 1.0})
    assert [(c.what, c.value, c.verdict) for c in checks] == [
        (f"{OURS} / fast", 0.5, "pass"),
        (f"{OURS} / torch", 2.0, "tie"),
        ("share of the limit", 0.5, "MISS"),
    ]


def test_a_bound_from_below_is_missed_from_below():
    check = Check("p", FORWARD, "share", 0.5, 0.75, at_least=True)
    assert check.verdict == "MISS"
    assert dataclasses.replace(check, value=0.7).verdict == "tie"
    assert dataclasses.replace(check, value=0.8).verdict == "pass"


def test_a_check_says_its_unit():
    check = Check("p", FORWARD, "overhead", 12.3, 60, unit=" µs")
    assert (check.measured, check.target) == ("12 µs", "≤ 60 µs")
    assert str(check) == "overhead: 12 µs (≤ 60 µs)"


def test_bursts_beside_other_processes_do_not_count():
    quiet, loud = Burst([1.0, 3.0], 0.0), Burst([90.0], 0.5)
    assert timing([quiet, loud, quiet]) == (2.0, 4, False)
    assert timing([loud, quiet, Burst([4.0], 0.2)]) == (3.0, 3, True)


def test_limits_take_the_slower_of_products_and_bytes():
    machine = Limits(gflops=100, gbytes=10, dispatch_us=1)
    assert machine.ms(Work(flops=1e9)) == pytest.approx(10)
    assert machine.ms(Work(flops=1e9, num_bytes=1e9)) == pytest.approx(100)


def test_a_peer_without_the_cell_says_so():
    pytest.importorskip("haiku")
    with pytest.raises(LeftOut, match="reset"):
        gated.contenders["haiku"].make(Gated("GRU", 2, 2, 2))


def test_the_oracle_has_a_gradient_for_each_array():
    problem = Gated("LSTM", 3, 2, 4)
    assert set(problem.oracle()) == {"y", *problem.arrays()}
    assert np.isfinite(problem.oracle()["x"]).all()
