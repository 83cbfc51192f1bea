"""A pair, compared when it is asked for."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from parity_tests.engine.compare import compare
from parity_tests.engine.report import Report

if TYPE_CHECKING:
    import torch


class Pair:
    """A torch module and its JAX port, for `twinscan parity FILE.py`.

    The arguments are those of `compare`. FILE.py has pairs at module level, or functions `-> Pair`
    without arguments, which are called when their pair is compared.
    """

    def __init__(
        self, twin: "torch.nn.Module", model: Callable[..., Any], *inputs: Any, **options: Any
    ) -> None:
        inspect.signature(compare).bind(twin, model, *inputs, **options)
        self.twin, self.model, self.inputs, self.options = twin, model, inputs, options

    def compare(self, **options: Any) -> Report:
        """The report of `compare`; these options take the places of the pair's own."""
        return compare(self.twin, self.model, *self.inputs, **{**self.options, **options})
