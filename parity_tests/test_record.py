"""What a report keeps, and what has moved between two."""

import dataclasses
import json
import math

import pytest

from parity_tests.record import Measurement, Record, moved
from parity_tests.tolerance import Error


def measurement(jax: float, dtype: str = "float32", group: str = "outputs") -> Measurement:
    return Measurement("LSTM", "cpu", dtype, group, Error(jax, 1e-7, 4.8e-7, False, "y"))


def record(*measurements: Measurement, jax: str = "0.10.2") -> Record:
    return Record({"jax": jax}, {"cpu": "ran", "gpu": "not on this machine"}, measurements)


def test_a_record_comes_back():
    before = record(measurement(1e-7), measurement(1e-6))
    after = Record.from_json(before.to_json())
    assert after == before
    assert not after.passed
    assert record(measurement(1e-7)).passed
    assert not dataclasses.replace(record(measurement(1e-7)), faults=("y: empty",)).passed


def test_json_has_no_nan():
    text = record(measurement(math.nan)).to_json()
    fields = json.loads(text, parse_constant=pytest.fail)
    assert fields["measurements"][0]["jax_error"] is None
    assert fields["measurements"][0]["passed"] is False
    assert not Record.from_json(text).passed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a record of --json"),
        ("[]", "not a record of --json"),
        ("{}", "not a record of --json .KeyError: 'schema'"),
        ('{"schema": 7}', "expected schema 1, got 7"),
    ],
)
def test_what_is_no_record(text, message):
    with pytest.raises(ValueError, match=message):
        Record.from_json(text)


def test_what_has_moved():
    old = record(measurement(1e-7), measurement(1e-16, "float64"), measurement(1e-7, group="gone"))
    new = record(measurement(6e-7), measurement(9e-16, "float64"), measurement(1e-7, group="came"))
    assert sorted(moved(old, dataclasses.replace(new, versions={"jax": "0.11.0"}))) == [
        "LSTM, cpu, float32, came: new, pass",
        "LSTM, cpu, float32, gone: not measured any more",
        "LSTM, cpu, float32, outputs: 1.0e-07 → 6.0e-07, pass → FAIL",
        "jax: 0.10.2 → 0.11.0",
    ]
    assert moved(old, old) == []
    assert moved(record(measurement(2e-7)), record(measurement(0.9e-7))) == [
        "LSTM, cpu, float32, outputs: 2.0e-07 → 9.0e-08, pass"
    ]
