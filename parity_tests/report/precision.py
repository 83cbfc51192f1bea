"""Measures the errors of coarser matrix products, whose operands are rounded as on TPUs and GPUs.

Unless told otherwise (`jax.default_matmul_precision("highest")`), a TPU rounds the float32 operands
of a matrix product to bfloat16, and a GPU may round them to TensorFloat-32; the sums are in
float32. A platform that does not round to a format by itself is emulated: the operands are rounded
by `lax.reduce_precision`, forward and backward. The emulation does not imitate the order of the
sums, nor a device's own FFT and elementary functions. It runs on the CPU, because cuDNN's products
cannot be rounded from outside.
"""

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from parity_tests.engine.candidates.evaluator import Evaluator
from parity_tests.engine.candidates.jax_program import bodies_in, equations_in
from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.candidates.torch_run import run_oracle
from parity_tests.engine.problem import Problem
from parity_tests.engine.results import errors_of
from parity_tests.report.record import PrecisionError

BITS = {"bfloat16": (8, 7), "tensorfloat32": (8, 10)}
"""The numbers of bits of the exponent and of the mantissa, for each format."""
DEFAULT = {"tpu": "bfloat16", "gpu": "tensorfloat32"}
"""The format to which a platform's own products round by default."""
PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")
KERNEL = "pallas_call"
FULL = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)


def precision_errors(name: str, problem: Problem, platform: str) -> Iterator[PrecisionError]:
    """The float32 errors with coarser products, together with those in full float32."""
    problem = in_full_float32(problem)
    oracle, _ = run_oracle(problem)

    def errors(platform: str = platform, **options) -> dict[str, float]:
        results = JaxSide(problem, platform, **options).run(problem, "float32", oracle)
        return {
            group: max(named.values())
            for group, named in errors_of(results, oracle).items()
            if named
        }

    highest = errors()
    for precision, bits in BITS.items():
        emulated = DEFAULT.get(platform) != precision
        coarse = (
            errors("cpu", evaluator=partial(RoundedProductsEvaluator, bits))
            if emulated
            else errors(precision=precision)
        )
        for group, error in coarse.items():
            yield PrecisionError(name, platform, precision, emulated, group, error, highest[group])


def in_full_float32(problem: Problem) -> Problem:
    """The problem with weights and inputs that the coarser formats cannot represent.

    The numbers of a case are exact in bfloat16, so rounding would not change them. Therefore they
    are scaled by random factors between 1 − 1/256 and 1.
    """
    rng = np.random.default_rng(problem.seed)

    def smaller(x: np.ndarray) -> np.ndarray:
        return (x * (1 - rng.random(x.shape) / 256)).astype(np.float32).astype(np.float64)

    twin = copy.deepcopy(problem.twin)
    with torch.no_grad():
        for weight in twin.parameters():
            if weight.ndim > 1:
                weight.copy_(torch.from_numpy(smaller(weight.numpy())))
    inputs = jax.tree.map(
        lambda x: smaller(x) if np.issubdtype(x.dtype, np.floating) else x, problem.inputs
    )
    return dataclasses.replace(problem, twin=twin, inputs=inputs)


class RoundedProductsEvaluator(Evaluator):
    """Evaluates a program with the float32 operands of its matrix products rounded to these bits.

    The body of a kernel is left unchanged, because it cannot be evaluated outside of its grid. So a
    kernel whose products depend on the default precision raises an error.
    """

    def __init__(self, bits: tuple[int, int], *args: Any):
        self._bits = bits
        super().__init__(*args)

    def _equation(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        if equation.primitive.name in PRODUCTS:
            operands = [
                lax.reduce_precision(x, *self._bits) if x.dtype == jnp.float32 else x
                for x in operands
            ]
        elif equation.primitive.name == KERNEL and any(
            inner.primitive.name in PRODUCTS and inner.params["precision"] != FULL
            for body, _ in bodies_in(equation.params)
            for inner, *_ in equations_in(body, [True] * len(body.invars))
        ):
            raise NotImplementedError("a product in a Pallas kernel that leaves its precision open")
        return super()._equation(equation, operands)
