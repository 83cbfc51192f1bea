"""Proof that JAX models equal their PyTorch twins.

`python -m parity_tests` is the report on this package's; `compare`, `assert_parity` and
`compare_training` take any, and `draft_table` drafts which weights are the same.
"""

from parity_tests.engine.compare import assert_parity, compare
from parity_tests.engine.draft import draft_table
from parity_tests.engine.measure import Report
from parity_tests.engine.training import TrainingReport, compare_training

__all__ = [
    "Report",
    "TrainingReport",
    "assert_parity",
    "compare",
    "compare_training",
    "draft_table",
]
