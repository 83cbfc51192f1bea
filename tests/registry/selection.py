"""Which checks run on which cases."""

from jax_models.models.hf import HFConfig
from parity_tests.checks import CHECKS
from parity_tests.registry import CASES, FIRST_CASES, LANGUAGE_MODELS, LAYERS, MUTATIONS
from parity_tests.registry.mutation import LEFT_PADDING

FAULTS = {(m.case, m.check) for m in MUTATIONS if m.check}
"""The case of each planted fault that a check must find, and the check."""

CHECKED = [
    name for name in CASES if name in FIRST_CASES.values() or any(name == n for n, _ in FAULTS)
]
"""The cases that checks run on. All other cases are compared with their twins."""


def layer(name: str):
    """The class of a case's layer, or the function that builds it."""
    make = CASES[name].layer
    return getattr(make, "func", make)


VARIANTS = [
    name
    for name in CHECKED
    if name not in FIRST_CASES.values()
    and layer(name) in {layer(first) for first in FIRST_CASES.values()}
]
"""The checked cases whose layer is that of a first case with other options. Only the checks run on
them that must find a fault."""

OF_LAYERS = (
    "cut equals uncut",
    "batch rows are independent",
    "steps with reset equal replay",
    "zeros have finite outputs and gradients",
    "an empty batch has empty results",
    "a document is the same wherever it is",
    "a document continues in another row and from a file",
    "jit equals eager",
    "vmap equals loop",
    "nan stays where it is",
    "optimizer follows the same trajectory",
)
"""The checks that would only find again in a language model what they find in its layers."""
OF_TWINS = (
    "no state gives the results of the twin",
    "the twin continues from its state",
    "weights make the round trip bit for bit",
)
"""The checks of what each language model has of its own: a twin, and keys in it."""


def is_shown_by_others(name: str, check: str) -> bool:
    """Whether layers, or another language model, show what the check would show of this one."""
    if name not in LANGUAGE_MODELS:
        return CASES[name].config is not None and check not in OF_TWINS
    # `test_peers_hybrids.py` compares left padding with transformers.
    is_hf = isinstance(CASES[name].config, HFConfig)
    return check in OF_LAYERS or (check == LEFT_PADDING and is_hf)


COLLECTED = [
    (name, check)
    for name in CHECKED
    for check in CHECKS
    if (name, check) in FAULTS or not (name in VARIANTS or is_shown_by_others(name, check))
]
"""Each case and check that is a test."""

_ARCHITECTURES = {CASES[name].architecture for name in (*LAYERS, *LANGUAGE_MODELS)}
LOCATED = [
    *{
        CASES[m.case].architecture: m
        for m in MUTATIONS
        if m.culprit is not None and CASES[m.case].architecture in _ARCHITECTURES
    }.values(),
]
"""A planted fault of each layer and of each kind of blocks, whose place `locate` must find."""
