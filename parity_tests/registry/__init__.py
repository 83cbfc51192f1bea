"""The registry: one file an architecture, its cases and its planted faults.

Every check and the report run over every case. A file of this folder that has `CASES` is in the
registry, and so are its `MUTATIONS`.
"""

import importlib
import pkgutil

from parity_tests.registry.case import BATCH, TIME, Case
from parity_tests.registry.mutation import Mutation

_FILES = [importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)]

CASES: dict[str, Case] = {case.name: case for file in _FILES for case in getattr(file, "CASES", ())}
MUTATIONS: tuple[Mutation, ...] = tuple(
    mutation for file in _FILES for mutation in getattr(file, "MUTATIONS", ())
)

__all__ = ["BATCH", "CASES", "MUTATIONS", "TIME", "Case", "Mutation"]
