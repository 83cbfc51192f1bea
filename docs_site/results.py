"""Writes the page of results from the records of the benchmarks."""

from benchmarks.families import FAMILIES
from benchmarks.report.page import page
from docs_site.blocks import ROOT

RECORDS = ROOT / "benchmarks" / "results"
"""The folder of the records. Links to it lead to the page."""


def results() -> str:
    """The page. Its links are relative to the folder of the records."""
    return page(RECORDS, FAMILIES)
