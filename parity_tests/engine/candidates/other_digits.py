"""Run a JAX side whose constants have other digits, such as those that the reference has."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from parity_tests.engine.bounds.rounded_constants import Digits
from parity_tests.engine.candidates.evaluator import Evaluator
from parity_tests.engine.candidates.jax_program import is_real
from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.problem import Arrays, Problem
from parity_tests.engine.results import Results


class OtherDigitsEvaluator(Evaluator):
    """Evaluates a program with other digits of its constants."""

    def __init__(self, digits: Digits, *args: Any):
        self._digits = digits
        super().__init__(*args)

    def _exact_decimal(self, value: Any) -> np.ndarray:
        return self._digits(super()._exact_decimal(value))


def with_digits(problem: Problem, digits: Digits) -> tuple[Problem, Callable[..., Evaluator]]:
    """The problem, and the `evaluator` of a `JaxSide`, for a float64 run with these digits."""
    problem = dataclasses.replace(problem, build=partial(_build_with_digits, problem, digits))
    return problem, partial(OtherDigitsEvaluator, digits)


def run_with_digits(
    problem: Problem,
    digits: Digits,
    oracle: Results,
    cast_to: Sequence[str],
    platform: str = "cpu",
) -> Results:
    """The float64 results if the constants of the program and of the model have these digits."""
    problem, evaluator = with_digits(problem, digits)
    return JaxSide(problem, platform, evaluator=evaluator).run(problem, "float64", oracle, cast_to)


def _build_with_digits(
    problem: Problem, digits: Digits, state_dict: Arrays, dtype: str
) -> tuple[Any, Any]:
    """The results of the problem's `build`, with other digits of the model's constants."""
    weights, rest = problem.build(state_dict, dtype)

    def with_other_digits(leaf: Any) -> Any:
        is_constant = is_real(getattr(leaf, "dtype", None))
        return jnp.asarray(digits(np.asarray(leaf, np.float64))) if is_constant else leaf

    return weights, jax.tree.map(with_other_digits, rest)
