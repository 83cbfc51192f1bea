"""The machinery of the benchmarks, on tiny shapes."""

import dataclasses
import importlib.util
import itertools
import json
import math
import os
import re
import signal
import threading
from functools import partial

import jax
import pytest
from rich.console import Console

from benchmarks import families, workers
from benchmarks.__main__ import RESULTS, UNFINISHED, main, run
from benchmarks.compare import Session
from benchmarks.environment import Environment
from benchmarks.families import attention, busy, delta_rule, first_call, gated, limits, plain
from benchmarks.families.gated.problem import Gated
from benchmarks.outcome import Check, Outcome, Row, check_targets
from benchmarks.problem import (
    BOTH,
    FORWARD,
    NATIVE,
    OURS,
    Call,
    Contender,
    Limits,
    only_definitions,
    without_kernels,
)
from benchmarks.report.overview import SHOWN
from benchmarks.report.page import page
from benchmarks.report.store import (
    BrokenRecord,
    Record,
    outcome_from,
    plot_path,
    read_all,
    write,
)
from benchmarks.resume import FILE
from benchmarks.workers import Burst, Unsuitable, Workers, timing
from jax_models import ops
from twinscan.command_line import CommandLineError


def shrink(monkeypatch, names, problems) -> None:
    """Reduces the family of gated recurrences to these contenders and problems, timed once."""
    monkeypatch.setattr(gated, "problems", lambda quick: problems)
    monkeypatch.setattr(gated, "contenders", {name: gated.contenders[name] for name in names})
    monkeypatch.setattr(limits, "MATMUL", 64)
    monkeypatch.setattr(limits, "TRIAD", 1024)
    monkeypatch.setattr(Session, "rounds", 1)


@pytest.mark.optimized
def test_a_family_end_to_end(tmp_path, monkeypatch, capsys):
    """Runs two processes, and writes JSON and a plot. The page shows both."""
    shrink(monkeypatch, (OURS, "torch.nn", "nnx.RNN", "equinox"), [Gated("RNN", 5, 2, 4)])
    tuned = record("tuned")
    write(tmp_path, tuned)
    (found,) = run(tmp_path, quick=True, platform="cpu", names={"default": ["gated"]})
    rows = {(row.name, row.part): row for row in found.outcome.rows}
    for name, part in itertools.product((OURS, "torch.nn", "nnx.RNN"), (FORWARD, BOTH)):
        row = rows[name, part]
        assert min(row.ms, row.limit_ms) > 0
        assert row.error < 1e-6
        assert part == FORWARD or row.gradient_error < 1e-6
    assert any(name.startswith("equinox") for name in found.outcome.left_out)
    assert {check.what for check in found.outcome.checks} >= {f"{OURS} / torch.nn"}
    assert set(found.environments) == {"jax", "torch"}
    for environment in found.environments.values():
        assert environment.cores == found.measured_with["cores"] <= environment.threads
        assert not environment.keeps_memory
    assert read_all(tmp_path) == [found, tuned]
    assert (tmp_path / "gated-cpu.png").read_bytes().startswith(b"\x89PNG")
    assert all(part in page(tmp_path, ["gated"]) for part in ("gated-cpu.png", "RNN T5 B2 H4"))
    assert "equinox (RNN T5 B2 H4): left out" in capsys.readouterr().out


def test_a_run_in_pieces_measures_each_once(tmp_path, monkeypatch, capsys):
    """The workers of this test are this process, so that its many calls start no others."""
    monkeypatch.setattr(Workers, "call", lambda _, framework, function, *args: function(*args))
    monkeypatch.setattr(Workers, "device", lambda _, framework: "cpu: cpu")
    monkeypatch.setattr(workers, "_burst", partial(workers._burst, seconds=0))
    problems = [Gated("RNN", 5, 2, 4), Gated("RNN", 6, 2, 4)]
    shrink(monkeypatch, (OURS, "torch.nn"), problems)
    args = ["--only", "gated", "--platform", "cpu", "--allocator", "default"]
    args += ["--out", str(tmp_path), "--minutes", "0.0001"]
    names = [limit.name for limit in limits.problems(True)] + [p.name for p in problems]
    for count in range(1, len(names) + 1):
        assert main(args) == (UNFINISHED if count < len(names) else 0)
        if count < len(names):
            found = json.loads((tmp_path / FILE).read_text())["pieces"]
            assert [name.rpartition(": ")[2] for name in found] == names[:count]
            assert not (tmp_path / "gated-cpu-default.json").exists()
    (whole,) = read_all(tmp_path)
    assert {row.problem for row in whole.outcome.rows} == {p.name for p in problems}
    assert [row for row in whole.outcome.rows if row.problem == problems[0].name] == (
        outcome_from(next(x for name, x in found.items() if problems[0].name in name)).rows
    )
    assert not (tmp_path / FILE).exists()
    assert capsys.readouterr().err.count("the same command continues") == len(names) - 1


def test_the_page_shows_every_record_and_device():
    """Each record has a section with its plot, whose file exists, and a row for its device."""
    text = page(RESULTS, families.FAMILIES)
    for record in read_all(RESULTS):
        assert f"## {record.title} ({record.platform})\n" in text
        assert f"]({plot_path(RESULTS, record).name})\n" in text
        assert f"\n| {record.platform} | {record.measured_with['device']} | " in text
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (RESULTS / link).exists()
    assert "[parity: 116 of 116 pairs agree](parity-gpu.json)" in text


def test_the_records_have_every_problem_and_contender_of_the_readmes_picture():
    """Each row of the picture has a time of ours and of every contender that it names."""
    names = {
        (record.family, row.problem, name)
        for record in read_all(RESULTS)
        for row in record.outcome.rows
        for name in {row.name, OURS if row.ours else row.name}
    }
    for each in SHOWN:
        for name in (OURS, *each.others):
            assert (each.family, each.problem, name) in names


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("framework", "variable", "value"),
    [("torch", "OMP_PROC_BIND", "true"), ("torch", "OMP_THREAD_LIMIT", "1"), ("jax", "NPROC", "1")],
)
def test_a_worker_without_all_cores_is_refused(monkeypatch, framework, variable, value):
    monkeypatch.setitem(workers.ENVIRONMENT, variable, value)
    with Workers("cpu") as processes:
        if framework == "torch":
            processes.devices["jax"] = "cpu: cpu"
        with pytest.raises(Unsuitable, match=f"^{framework}: expected {processes.cores} threads"):
            processes.device(framework)


def keep_one_core() -> None:
    """Restricts all threads of this process to one core."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), [min(os.sched_getaffinity(0))])


@pytest.mark.optimized
def test_a_worker_that_lost_its_cores_is_refused_afterwards():
    with Workers("cpu") as processes:
        processes.device("jax")
        processes.call("jax", keep_one_core)
        with pytest.raises(Unsuitable, match="jax:"):
            processes.environments()


@pytest.mark.slow
def test_a_worker_that_is_killed_before_it_reads_a_call():
    with Workers("cpu") as processes:
        processes.call("jax", os.getpid)
        process, _ = processes.processes["jax"]
        os.kill(process.pid, signal.SIGSTOP)
        threading.Timer(0.5, process.kill).start()
        with pytest.raises(Unsuitable, match=r"^jax: its worker ended with code -9, which"):
            processes.call("jax", os.getpid)


@pytest.mark.optimized
@pytest.mark.parametrize("allocator", ["default", "tuned"])
def test_a_worker_has_the_allocator_whatever_the_shell_says(monkeypatch, allocator):
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "0")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_max=0")
    with Workers("cpu", allocator) as processes:
        processes.device("jax")
        environment = processes.environments()["jax"]
    assert environment.keeps_memory == (allocator == "tuned")
    assert ("M_MMAP_MAX 0" in environment.malloc) == (allocator == "tuned")
    assert environment.variables.keys().isdisjoint({"MALLOC_MMAP_MAX_", "GLIBC_TUNABLES"})


def record(allocator: str, **fields) -> Record:
    """A made-up record."""
    check = Check("p", FORWARD, f"{OURS} / torch", 2.0, 1.5)
    environment = Environment(2, 2, "glibc 2.36", allocator == "tuned", {})
    values = {
        "family": "gated",
        "title": "The gated recurrences",
        "platform": "cpu",
        "allocator": allocator,
        "quick": False,
        "measured_with": {"processor": "Zen 9", "cores": 2},
        "environments": {"jax": environment, "torch": environment},
        "limits": Limits(1, 1, 1),
        "outcome": Outcome([row(OURS, 3.0), row("torch", 1.5, "torch")], [check]),
    }
    return Record(**values | fields)


@pytest.mark.parametrize("text", ['{"outcome": {}}', "{", '{"outcome": 1, "limits": 2}'])
def test_a_broken_record_is_named_before_anything_is_measured(tmp_path, text):
    (tmp_path / "wkv-cpu-default.json").write_text(text)
    with pytest.raises(BrokenRecord, match=r"wkv-cpu-default\.json:") as error:
        run(tmp_path, quick=True, platform="cpu", names={"default": ["wkv"]})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("args", "argument"),
    [
        (["--platform", "foo"], "--platform"),
        (["--only", "foo"], "--only"),
        (["--minutes", "0"], "--minutes:"),
        (["--allocator", "foo"], "--allocator"),
        (["--platform", "tpu", "--only", "wkv"], "--platform:"),
    ],
)
def test_a_wrong_argument_is_named_in_one_line(tmp_path, args, argument):
    with pytest.raises(CommandLineError, match=argument) as error:
        main([*args, "--out", str(tmp_path)])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_family_has_what_the_command_needs(name):
    """A family has a title, and its own `measure` or problems and contenders, ours first.

    A quick run has fewer problems.
    """
    module = families.family(name)
    assert families.title(name)
    if not hasattr(module, "problems"):
        assert callable(module.measure)
        return
    quick, full = module.problems(True), module.problems(False)
    assert len({problem.name for problem in full}) == len(full)
    assert 0 < len(quick) <= len(full)
    assert next(iter(module.contenders)) == OURS
    for problem in full:
        assert {OURS} <= {*(problem.solved_by or module.contenders)} <= {*module.contenders}
        for part in problem.parts:
            against = {"torch", "JAX peer", "limit", *module.contenders}
            for targets in (problem.targets, problem.targets_with_kernels):
                assert set(targets(part, "cpu")) <= against


@pytest.mark.parametrize("name", families.TUNED)
def test_with_the_tuned_allocator_a_family_is_compared_with_pytorch_only(monkeypatch, name):
    monkeypatch.setattr(families, "compare", lambda session, module, contenders, _: contenders)
    all_of_it, tuned = (
        families.measure(name, Session(Workers("cpu", allocator), Console()))
        for allocator in ("default", "tuned")
    )
    assert tuned.items() < all_of_it.items()
    assert {each.framework for key, each in tuned.items() if not key.startswith(OURS)} == {"torch"}


@pytest.mark.skipif(
    importlib.util.find_spec("twinscan_native") is None, reason="twinscan-native is not installed"
)
@pytest.mark.parametrize("family", [attention, busy, delta_rule, gated, plain])
def test_only_contenders_with_kernels_run_those_of_twinscan_native(family):
    """The others are traced as on a machine without the package, whatever is installed."""
    chosen = {True: set(), False: set()}
    for problem, (name, contender) in itertools.product(
        family.problems(False)[::-6], family.contenders.items()
    ):
        is_solved = problem.solved_by is None or name in problem.solved_by
        if is_solved and name in (OURS, NATIVE):
            function = contender.make(problem)
            with contender.tracing():
                tables = ops.forms_of(function.apply, function.params)
            chosen[contender.kernels] |= {table.chosen for table in tables}
    assert "native" in chosen[True]
    assert "native" not in chosen[False]


@pytest.mark.parametrize("model", ["LSTM", "Hawk", "RWKV-7", "Qwen3.5", "Granite 4"])
def test_plain_scans_run_only_definitions(model):
    config = dataclasses.replace(first_call.configs(False)[model], num_layers=4)
    call = first_call.CONTENDERS[first_call.PLAIN].make(config, FORWARD)
    assert {table.chosen for table in ops.forms_of(call)} == {"definition"}


def test_a_program_is_traced_again_if_fewer_forms_are_available():
    x = jax.numpy.ones((1, 100, 1, 8))
    run = jax.jit(lambda x: ops.attention(x, x, x))
    texts = []
    for tracing in (without_kernels, only_definitions, without_kernels):
        with tracing():
            texts.append(run.lower(x).as_text())
    assert texts[0] == texts[2] != texts[1]


def test_a_call_is_compiled_once(monkeypatch):
    """It is timed in the context in which it was prepared."""
    traces = []
    call = Call(jax.jit(lambda: traces.append("traced")))
    contender = Contender("jax", lambda _: call, kernels=False)
    monkeypatch.setitem(gated.contenders, OURS, contender)
    workers._prepare(gated.__name__, OURS, Gated("RNN", 5, 2, 4), FORWARD)
    workers._burst(OURS, seconds=0)
    workers._forget()
    assert traces == ["traced"]


def row(name: str, ms: float, framework="jax", **fields) -> Row:
    return Row("p", FORWARD, name, framework, ms, **fields)


def test_targets_are_against_the_fastest_peer_that_computes_the_same():
    variant = f"{OURS}, variant"
    rows = [
        row(OURS, 2.0, limit_ms=1.0),
        row(variant, 0.1),
        row(NATIVE, 1.0),
        row("slow", 8.0),
        row("fast", 4.0),
        row("other", 1.0, error=0.1),
        row("torch", 1.0, "torch"),
    ]
    targets = {"JAX peer": 0.5, "torch": 1.9, "limit": 0.6, "absent": 1.0, variant: 10.0}
    checks = check_targets(rows, {OURS: targets, NATIVE: {"JAX peer": 0.2, OURS: 0.5}})
    assert [(c.what, c.value, c.verdict) for c in checks] == [
        (f"{OURS} / fast", 0.5, "pass"),
        (f"{OURS} / torch", 2.0, "tie"),
        (f"{OURS}, share of the limit", 0.5, "MISS"),
        (f"{OURS} / {variant}", 20.0, "MISS"),
        (f"{NATIVE} / fast", 0.25, "MISS"),
        (f"{NATIVE} / {OURS}", 0.5, "pass"),
    ]


def test_the_plot_of_operators_leaves_out_what_has_no_ratio():
    measured, alone = (problem.name for problem in plain.problems(quick=False)[:2])
    names = [(measured, OURS), (measured, plain.PLAIN), (alone, OURS)]
    names += [("another size", OURS), ("another size", plain.PLAIN)]
    rows = [Row(problem, FORWARD, name, "jax", 1.0) for problem, name in names]
    panel, *_ = plain.plot({"glibc": rows}, "title").axes
    points, *_ = panel.lines
    assert points.get_xydata().tolist() == [[1.0, 0.0]]


def test_bursts_beside_other_processes_do_not_count():
    quiet, loud = Burst([1.0, 3.0], 0.0), Burst([90.0], 0.5)
    assert timing([quiet, loud, quiet]) == (2.0, 4, False)
    assert timing([loud, quiet, Burst([4.0], 0.2)]) == (3.0, 3, True)
    assert timing([loud, quiet, loud], quiet_load=math.inf) == (46.5, 4, False)
