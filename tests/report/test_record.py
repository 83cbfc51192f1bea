"""The record of a report, its page, and the differences between two records."""

import dataclasses
import importlib.metadata
import io
import json
import math
import re
from html import unescape

import pytest
from rich.console import Console

from parity_tests.engine.bounds.tolerance import Error
from parity_tests.engine.logits import LogitsError
from parity_tests.report.html import page
from parity_tests.report.record import (
    ErrorOverTime,
    LogitsMeasurement,
    Measurement,
    MutationResult,
    PrecisionError,
    Record,
    changes,
    versions,
)
from parity_tests.report.terminal import print_record

CAUGHT = MutationResult("head forgotten", "LSTM", "weights", None, True)
MISSED = dataclasses.replace(CAUGHT, caught=False)


def measurement(
    jax: float,
    dtype: str = "float32",
    group: str = "outputs",
    *,
    case: str = "LSTM",
    tensor: str = "y",
) -> Measurement:
    return Measurement(case, "cpu", dtype, group, Error(jax, 1e-7, 4.8e-7, False, tensor))


def record(*measurements: Measurement) -> Record:
    platforms = {"cpu": "ran", "gpu": "not on this machine"}
    return Record({"jax": "0.10.2"}, platforms, measurements, cases={"LSTM": "lstm"})


def full_record() -> Record:
    """A record with entries of every kind."""
    return dataclasses.replace(
        record(measurement(1e-7), measurement(1e-6)),
        precision=(PrecisionError("LSTM", "cpu", "bfloat16", True, "outputs", 3e-3, 1e-7),),
        mutations=(MISSED,),
        over_time=(ErrorOverTime("LSTM", "cpu", "float32", (1e-7, 2e-7), (math.nan, 0.0)),),
        not_run={"LSTM by cuDNN": ("gpu",)},
        tensors=(measurement(1e-8),),
        logits=(LogitsMeasurement("LSTM", "cpu", "float32", "JAX", LogitsError(*6 * [0.25])),),
        done=("errors: LSTM, cpu",),
    )


def test_a_record_comes_back():
    before = full_record()
    assert Record.from_json(before.to_json()) == before
    older = json.loads(before.to_json())
    del older["done"]
    assert Record.from_json(json.dumps(older)) == dataclasses.replace(before, done=())


def test_entries_have_the_fields_that_the_docs_list():
    fields, place = json.loads(full_record().to_json()), {"case": "LSTM", "platform": "cpu"}
    assert fields["schema"] == 2
    assert fields["measurements"][1] == place | {
        "dtype": "float32",
        "group": "outputs",
        "torch_error": 1e-7,
        "jax_error": 1e-6,
        "ratio": pytest.approx(10),
        "bound": 4.8e-7,
        "unstable_reference": False,
        "tensor": "y",
        "verdict": "FAIL",
    }
    errors = {"torch": [1e-7, 2e-7], "jax": [None, 0.0]}
    assert fields["over_time"] == [place | {"dtype": "float32"} | errors]
    names = ("kl_mean", "kl_max", "log_prob_mean", "log_prob_max", "top_1", "top_k")
    logits = {"dtype": "float32", "side": "JAX", **dict.fromkeys(names, 0.25)}
    assert fields["logits"] == [place | logits]


def test_what_fails():
    cases = {"LSTM": "lstm", "LSTM, 2": "lstm", "GRU": "gru"}
    good = dataclasses.replace(record(measurement(1e-7)), cases=cases)
    assert good.failing == set()
    assert good.passed
    for change in ({"faults": ("y: empty",)}, {"mutations": (MISSED,)}):
        assert not dataclasses.replace(good, **change).passed
    assert dataclasses.replace(good, faults=("LSTM, 2, cpu: y: empty",)).failing == {"LSTM, 2"}
    bad = dataclasses.replace(good, measurements=(measurement(1e-6),), faults=("GRU, gpu: no",))
    assert (bad.failing, bad.faulty, bad.passed) == ({"LSTM", "GRU"}, {"GRU"}, False)


def test_what_did_not_run_is_named():
    ran = dataclasses.replace(record(measurement(1e-7)), cases={"LSTM": "lstm", "GRU": "gru"})
    elsewhere = Record({"jax": "0.10.2"}, ran.platforms, (), not_run={"LSTM": ("gpu",)})
    print_record(elsewhere, Console(file=(printed := io.StringIO()), width=160))
    assert "not run: LSTM, which runs on gpu only\n" in printed.getvalue()
    assert "not run: LSTM, which runs on gpu only" in page(elsewhere)
    assert changes(ran, elsewhere) == ["LSTM, cpu, float32, outputs: not measured any more"]


def test_json_has_no_nan():
    text = record(measurement(math.nan)).to_json()
    fields = json.loads(text, parse_constant=pytest.fail)
    assert fields["measurements"][0]["jax_error"] is None
    assert fields["measurements"][0]["verdict"] == "FAIL"
    assert not Record.from_json(text).passed


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"schema": 7}',
        200_000 * "[",
        json.dumps({**json.loads(record().to_json()), "cases": 5}),
        record(dataclasses.replace(measurement(1e-7), case=[3])).to_json(),
        record(measurement(1e-7)).to_json()[:-20],
    ],
)
def test_what_is_no_record(text):
    with pytest.raises(ValueError, match=r"not a record of --json|expected"):
        Record.from_json(text)


def test_what_has_moved():
    old = record(measurement(1e-7), measurement(1e-16, "float64"), measurement(1e-7, group="gone"))
    new = record(measurement(6e-7), measurement(9e-16, "float64"), measurement(1e-7, group="came"))
    assert sorted(changes(old, dataclasses.replace(new, versions={"jax": "0.11.0"}))) == [
        "LSTM, cpu, float32, came: new, pass",
        "LSTM, cpu, float32, gone: not measured any more",
        "LSTM, cpu, float32, outputs: 1.0e-07 → 6.0e-07, pass → FAIL",
        "jax: 0.10.2 → 0.11.0",
    ]
    assert changes(old, old) == []
    assert changes(record(measurement(2e-7)), record(measurement(0.9e-7))) == [
        "LSTM, cpu, float32, outputs: 2.0e-07 → 9.0e-08, pass"
    ]
    old = dataclasses.replace(old, mutations=(CAUGHT,))
    new = dataclasses.replace(
        old,
        platforms={"cpu": "ran", "gpu": "ran"},
        faults=("LSTM, gpu: y: empty",),
        mutations=(MISSED,),
    )
    assert changes(old, new) == [
        "gpu: not on this machine → ran",
        "new: LSTM, gpu: y: empty",
        "LSTM, head forgotten: not caught any more",
    ]
    others = dataclasses.replace(record(measurement(1e-7)), cases={"GRU": "gru"})
    assert changes(old, others) == []


BROKEN = "</pre><b>&quot;[red]"


RECORD = dataclasses.replace(
    record(
        measurement(1e-7),
        measurement(0.05, case="GRU"),
        measurement(math.nan, "bfloat16", case=BROKEN),
        measurement(1e-7, case="Hawk"),
    ),
    faults=("HyenaBlock, cpu: outputs: all of them are empty", "Hawk, cpu: edge inputs: differ"),
    cases={"LSTM": "lstm", "GRU": "gru", BROKEN: "broken", "HyenaBlock": "hyena", "Hawk": "hawk"},
    tensors=(measurement(1e-7), measurement(3e-7, tensor="[1].y")),
    notes=(f"{BROKEN}: gradients are not compared",),
    locations={"GRU": "a table\nfirst to depart: norm"},
)


def test_a_page_shows_every_pair_and_asks_for_nothing():
    html = page(RECORD)
    assert not re.search(r"@import|url\(|<script|<link|<img|src=|href=", html)
    assert "<b>" not in html
    text = unescape(re.sub(r"<[^>]*>", "", html))
    assert "1 pair agrees; 4 fail" in text
    rows = [re.split(r"\s*│\s*", line) for line in text.splitlines() if "│" in line]
    shown = {(row[1], row[3], row[-2]) for row in rows}
    assert {
        ("LSTM", "float32", "pass"),
        ("GRU", "float32", "FAIL"),
        (BROKEN, "bfloat16", "FAIL"),
        ("HyenaBlock", "", "FAIL"),
        ("Hawk", "float32", "FAIL"),  # its numbers agree, but the pair has a fault
    } <= shown
    tensors = [row[-2] for row in rows if row[1] == "LSTM" and row[4] == "outputs"]
    assert tensors == ["[1].y", "y"], "those that take most of their bounds come first"
    lines = ("first to depart: norm", "gpu: not on this machine", "jax 0.10.2")
    assert all(line in text for line in (*RECORD.faults, *RECORD.notes, *lines))


def test_planted_faults_are_counted():
    missed = MutationResult("mask forgotten", "LSTM", "states and masks", "padding", False)
    html = page(dataclasses.replace(RECORD, mutations=(CAUGHT, missed)))
    assert "planted faults: 1 of 2 caught" in html
    assert "LSTM: mask forgotten: not caught by padding" in html


def test_packages_that_are_not_installed_have_no_version(monkeypatch):
    version = importlib.metadata.version

    def without_torch(name):
        if name == "torch":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    assert "torch" in versions()
    monkeypatch.setattr(importlib.metadata, "version", without_torch)
    assert versions().keys() == {"python", "jax", "flax", "numpy"}
