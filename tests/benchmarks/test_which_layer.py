"""The figures on the page about layers are those of the record."""

import json
from pathlib import Path

from benchmarks.which_layer import FILE, tables
from parity_tests.registry import COMPARED

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "which_layer.md"


def test_the_page_shows_the_record():
    """If it does not, copy what `python -m benchmarks.which_layer tables` prints."""
    record = json.loads(FILE.read_text(encoding="utf-8"))
    assert record["layers"].keys() <= COMPARED.keys()
    rows = tables(record)
    page = PAGE.read_text(encoding="utf-8").splitlines()
    assert [line for line in page if line in rows] == rows
