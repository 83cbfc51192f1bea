"""Measures the JAX side of a problem against its torch side. This file needs torch."""

from collections.abc import Iterable

from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.problem import DTYPES, Problem
from parity_tests.engine.references.torch_reference import TorchReference
from parity_tests.engine.verdict.measure import measure
from parity_tests.engine.verdict.report import Report


def measure_twin(
    problem: Problem,
    dtypes: Iterable[str] = DTYPES,
    platform: str = "cpu",
    *,
    jax_side: JaxSide | None = None,
) -> Report:
    """Runs `measure` with the problem's torch module as the reference."""
    reference = TorchReference(problem.twin).run(problem)
    return measure(problem, reference, dtypes, platform, jax_side=jax_side)
