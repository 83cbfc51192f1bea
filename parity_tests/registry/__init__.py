"""The registry: a file for each architecture, with its cases and its planted faults.

The report compares every case with its twin. The checks run on the first case of each architecture
and on the cases with a planted fault that a check must find. The layers in `COMPARED` are
trained and timed for the page that helps to choose a layer. The registry collects the lists of the
files in this folder, and of the modules that other packages name in the entry point group
`twinscan.registry`.
"""

import sys
from collections.abc import Callable
from typing import Any

from jax_models.entry_points import by_name, modules_of
from parity_tests.registry.case import BATCH, TIME, Case
from parity_tests.registry.mutation import Mutation

ENTRY_POINTS = "twinscan.registry"
_FILES = [*modules_of(sys.modules[__name__], ENTRY_POINTS)]

CASES: dict[str, Case] = by_name(
    "case",
    ((case.name, case, file.__name__) for file in _FILES for case in getattr(file, "CASES", ())),
)
# A slice, because `reversed` is a module of this package here.
FIRST_CASES = {case.architecture: name for name, case in [*CASES.items()][::-1]}
"""The name of the first case of each architecture."""
MUTATIONS: tuple[Mutation, ...] = tuple(
    mutation for file in _FILES for mutation in getattr(file, "MUTATIONS", ())
)
COMPARED: dict[str, Callable[..., Any]] = by_name(
    "compared layer",
    (
        (name, layer, file.__name__)
        for file in _FILES
        for name, layer in getattr(file, "COMPARED", {}).items()
    ),
)
"""The layers that `benchmarks.which_layer` trains and times, each as a function of its width and of
the options of every layer.
"""

__all__ = ["BATCH", "CASES", "COMPARED", "FIRST_CASES", "MUTATIONS", "TIME", "Case", "Mutation"]
