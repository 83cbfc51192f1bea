"""Proof that JAX models equal their PyTorch twins.

`python -m parity_tests` compares the models of this package; `compare`, `assert_parity` and
`compare_training` compare any pair. `record` writes the torch side of a comparison to a file, so
that the comparison can run where torch is not installed. `draft_table` drafts a weight table, and
`tap` names values in a function. Each name is imported when it is first used, because pytest loads
`parity_tests.plugin` wherever this package is installed, and should not import JAX and torch.
"""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parity_tests.engine.compare import Pair, assert_parity, compare
    from parity_tests.engine.references.recording import record
    from parity_tests.engine.tables.draft import draft_table
    from parity_tests.engine.traces.tap import tap
    from parity_tests.engine.training.compare_training import compare_training
    from parity_tests.engine.training.training_report import TrainingReport
    from parity_tests.engine.verdict.report import Report
    from parity_tests.report.save import save

__all__ = [
    "Pair",
    "Report",
    "TrainingReport",
    "assert_parity",
    "compare",
    "compare_training",
    "draft_table",
    "record",
    "save",
    "tap",
]
ROOMS = {
    "engine.compare": ("Pair", "assert_parity", "compare"),
    "engine.tables.draft": ("draft_table",),
    "engine.traces.tap": ("tap",),
    "engine.references.recording": ("record",),
    "engine.verdict.report": ("Report",),
    "engine.training.compare_training": ("compare_training",),
    "engine.training.training_report": ("TrainingReport",),
    "report.save": ("save",),
}

# The folder of a user may have modules of the same names as the packages that this one imports.
# The pytest plugin needs only `twinscan`, so the names of the others stay free until they are used.
sys.path.insert(0, str(Path(__file__).parents[1]))
pin = importlib.import_module("twinscan.own_packages").pin
del sys.path[0]
pin("twinscan")


def __getattr__(name: str) -> Any:
    room = next((room for room, names in ROOMS.items() if name in names), None)
    if room is None:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    pin("jax_models", "torch_ref")
    try:
        value = getattr(importlib.import_module(f"{__name__}.{room}"), name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{name}: {error.name} is not installed: run pip install '.[torch]' in a clone of "
            "twinscan",
            name=error.name,
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
