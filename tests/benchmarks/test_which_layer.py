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
        assert all(row.keys() >= {"date", "versions"} for row in layer.values())
    rows = tables(record)
    page = PAGE.read_text(encoding="utf-8").splitlines()
    assert [line for line in page if line in rows] == rows


def test_a_row_has_its_own_versions(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.which_layer.FILE", tmp_path / "record.json")
    found = {"speed": {"jax": "old"}, "learning": {"jax": "new"}}
    for part, versions in found.items():
        monkeypatch.setattr("benchmarks.which_layer.versions", lambda each=versions: each)
        store("GRU", part, {})
    rows = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))["layers"]["GRU"]
    assert {part: row["versions"] for part, row in rows.items()} == found
