"""Writes the page of results from the records of the benchmarks."""

from benchmarks.families import FAMILIES
from benchmarks.report.page import page
from docs_site.blocks import ROOT

PLACE = "benchmarks/results/README.md"
"""The place of the page, to which links to the folder of the records lead."""


def results() -> str:
    """The page of results. Its links are relative to the folder of the records."""
    return page((ROOT / PLACE).parent, FAMILIES)
