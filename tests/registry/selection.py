"""Which checks run on which cases."""

from parity_tests.checks import CHECKS
from parity_tests.registry import CASES, MUTATIONS

FIRST = {case.architecture: name for name, case in reversed(CASES.items())}
"""The first case of each architecture."""

CHECKED = [
    name
    for name in CASES
    if name in FIRST.values() or any(m.case == name and m.check for m in MUTATIONS)
]
"""The cases that the checks run on: the first of each architecture, and those with a planted fault
that a check must find. All other cases are compared with their twins."""

OF_LAYERS = (
    "an empty batch has empty results",
    "a document is the same wherever it is",
    "jit equals eager",
    "vmap equals loop",
)
"""The checks that would only find again in a language model what they find in its layers."""

COLLECTED = [
    (name, check)
    for name in CHECKED
    for check in CHECKS
    if CASES[name].config is None or check not in OF_LAYERS
]
"""Each case and check that is a test."""
