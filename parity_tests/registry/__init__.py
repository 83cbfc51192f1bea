"""The registry: one file an architecture, its cases and its planted faults.

Every check and the report run over every case. The registry is made of the `CASES` and `MUTATIONS`
of the files in this folder, and of the modules that other packages name in the entry point group
`twinscan.registry`.
"""

import sys

from jax_models.models.architecture import modules_of
from parity_tests.registry.case import BATCH, TIME, Case
from parity_tests.registry.mutation import Mutation

_FILES = [*modules_of(sys.modules[__name__], "twinscan.registry")]

CASES: dict[str, Case] = {case.name: case for file in _FILES for case in getattr(file, "CASES", ())}
MUTATIONS: tuple[Mutation, ...] = tuple(
    mutation for file in _FILES for mutation in getattr(file, "MUTATIONS", ())
)

__all__ = ["BATCH", "CASES", "MUTATIONS", "TIME", "Case", "Mutation"]
