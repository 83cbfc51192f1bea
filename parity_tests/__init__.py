"""Proof that JAX models equal their PyTorch twins.

`python -m parity_tests` is the report on this package's; `compare`, `assert_parity` and
`compare_training` take any. `tap` names
values for them.
"""

from parity_tests.engine.compare import assert_parity, compare
from parity_tests.engine.locate import tap
from parity_tests.engine.measure import Report
from parity_tests.engine.training import TrainingReport, compare_training

__all__ = ["Report", "TrainingReport", "assert_parity", "compare", "compare_training", "tap"]
