"""The figures on the page about layers are those of the record."""

import json
from pathlib import Path

from benchmarks.which_layer import FILE, store, tables
from parity_tests.registry import COMPARED

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "which_layer.md"


def test_the_page_shows_the_record():
    """If it does not, copy what `python -m benchmarks.which_layer tables` prints."""
    record = json.loads(FILE.read_text(encoding="utf-8"))
    assert record["layers"].keys() <= COMPARED.keys()
    for layer in record["layers"].values():
        assert all(row.keys() >= {"date", "processor"} for row in layer.values())
    rows = tables(record)
    page = PAGE.read_text(encoding="utf-8").splitlines()
    assert [line for line in page if line in rows] == rows


def test_a_row_has_its_own_date_and_processor(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.which_layer.FILE", tmp_path / "record.json")
    for processor, part in (("old", "speed"), ("new", "learning")):
        monkeypatch.setattr("benchmarks.which_layer.processor", lambda name=processor: name)
        store("GRU", part, {})
    rows = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))["layers"]["GRU"]
    assert [row["processor"] for row in rows.values()] == ["old", "new"]
