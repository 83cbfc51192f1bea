"""The report's page."""

import dataclasses
import re
from html import unescape

from parity_tests.engine.bounds.tolerance import Error
from parity_tests.report.html import page
from parity_tests.report.record import Measurement, MutationResult, Record

BROKEN = "</pre><b>&quot;[red]"


def measurement(case: str, dtype: str, jax: float, tensor: str = "y") -> Measurement:
    error = Error(jax, torch=2e-8, bound=8e-8, unstable=False, tensor=tensor)
    return Measurement(case, "cpu", dtype, "outputs", error)


RECORD = Record(
    {"python": "3.11.7", "jax": "0.10.2"},
    {"cpu": "ran", "gpu": "not on this machine"},
    (
        measurement("LSTM", "float32", 3e-8),
        measurement("GRU", "float32", 0.05),
        measurement(BROKEN, "bfloat16", float("nan")),
    ),
    ("HyenaBlock, cpu: outputs: all of them are empty",),
    cases={"LSTM": "lstm", "GRU": "gru", BROKEN: "broken", "HyenaBlock": "hyena"},
    tensors=(measurement("LSTM", "float32", 3e-8), measurement("LSTM", "float32", 5e-8, "[1].y")),
    notes=(f"{BROKEN}: gradients are not compared",),
    locations={"GRU": "a table\nfirst to depart: norm"},
)


def test_a_page_shows_every_pair_and_asks_for_nothing():
    html = page(RECORD)
    assert not re.search(r"@import|url\(|<script|<link|<img|src=|href=", html)
    assert "<b>" not in html
    text = unescape(re.sub(r"<[^>]*>", "", html))
    assert "1 pair agrees; 3 fail" in text
    rows = [re.split(r"\s*│\s*", line) for line in text.splitlines() if "│" in line]
    shown = {(row[1], row[3], row[-2]) for row in rows}
    assert {
        ("LSTM", "float32", "pass"),
        ("GRU", "float32", "FAIL"),
        (BROKEN, "bfloat16", "FAIL"),
        ("HyenaBlock", "", "FAIL"),
    } <= shown
    tensors = [row[-2] for row in rows if row[1] == "LSTM" and row[4] == "outputs"]
    assert tensors == ["[1].y", "y"], "those that take most of their bounds come first"
    lines = ("first to depart: norm", "gpu: not on this machine", "python 3.11.7, jax 0.10.2")
    assert all(line in text for line in (*RECORD.faults, *RECORD.notes, *lines))


def test_planted_faults_are_counted():
    caught = MutationResult("gates swapped", "LSTM", "weights", None, True)
    missed = MutationResult("mask forgotten", "LSTM", "states and masks", "padding", False)
    html = page(dataclasses.replace(RECORD, mutations=(caught, missed)))
    assert "planted faults: 1 of 2 caught" in html
    assert "LSTM: mask forgotten: not caught by padding" in html
