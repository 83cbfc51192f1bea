"""What a comparison starts from: where the reference and its weights come from."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from parity_tests.engine.port import Known
from parity_tests.engine.problem import Problem
from parity_tests.engine.reference import Reference


@dataclasses.dataclass(frozen=True)
class Source:
    """A reference before it is known what is measured against it."""

    twin: Any
    """What the problem gets as its twin."""
    known: Known
    reference: Callable[[Problem, Callable[[str], None]], Reference]
    """`reference(problem, say)`."""


@contextlib.contextmanager
def opened(twin: Any) -> Iterator[Source]:
    """The source that a user names by a torch module."""
    from parity_tests.engine.torch_port import checked_twin, weights_known
    from parity_tests.engine.torch_reference import TorchReference
    from parity_tests.engine.torch_side import one_thread

    twin = checked_twin(twin)
    with one_thread():
        yield Source(twin, weights_known(twin), TorchReference)
