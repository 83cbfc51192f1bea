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

from jax_models import SequenceLayer
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


def _own_layers(name: str) -> frozenset[type]:
    """The layers in the files of a language model's config and of its base classes."""
    files = [sys.modules[base.__module__] for base in type(CASES[name].config).__mro__]
    return frozenset(
        each
        for file in files
        for each in vars(file).values()
        if isinstance(each, type) and issubclass(each, SequenceLayer)
        if each.__module__ == file.__name__
    )


LAYERS = [name for name in FIRST_CASES.values() if CASES[name].config is None]
"""The first case of each architecture that is not a language model."""
LANGUAGE_MODELS = {
    _own_layers(name) or name: name
    for name in FIRST_CASES.values()
    if CASES[name].config is not None
}.values()
"""The first language model with each kind of blocks.

All others arrange the same blocks in another way. They are compared with their twins in float64,
and these show what other dtypes, devices and exports change.
"""
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

__all__ = [
    "BATCH",
    "CASES",
    "COMPARED",
    "FIRST_CASES",
    "LANGUAGE_MODELS",
    "LAYERS",
    "MUTATIONS",
    "TIME",
    "Case",
    "Mutation",
]
