"""What coarser matrix products would cost: their operands rounded as TPUs and GPUs round them.

Unless told otherwise (`jax.default_matmul_precision("highest")`), a TPU rounds the float32 operands
of a matrix product to bfloat16, and a GPU may round them to TensorFloat-32; the sums are in
float32. A CPU does neither, so that there the operands are rounded by `lax.reduce_precision`,
forward and backward. The sums' order, and a device's own FFT and elementary functions, are not
imitated. Emulation runs on the CPU: cuDNN's products cannot be rounded from outside.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from parity_tests.engine.bounds.tolerance import relative_errors
from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.candidates.torch_run import run_oracle
from parity_tests.engine.problem import Arrays, Problem
from parity_tests.engine.results import only_floating
from parity_tests.report.record import PrecisionError

BITS = {"bfloat16": (8, 7), "tensorfloat32": (8, 10)}
"""Bits of the exponent and of the mantissa."""
DEFAULT = {"tpu": "bfloat16", "gpu": "tensorfloat32"}
"""What a platform's own products round to, by default."""
PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")
KERNEL = "pallas_call"
"""Its body has a place in a grid, so it is left as it is."""
FULL = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)


def precision_errors(name: str, problem: Problem, platform: str) -> Iterator[PrecisionError]:
    """The float32 errors with coarser products, beside those with products in full float32."""
    problem = in_full_float32(problem)
    oracle, _ = run_oracle(problem)

    def errors(platform: str = platform, **options) -> dict[str, float]:
        results = JaxSide(problem, platform, **options).run(problem, "float32", oracle)
        return {
            group: largest_error(group, only_floating(results[group]), floating)
            for group, expected in oracle.items()
            if group in results and (floating := only_floating(expected))
        }

    highest = errors()
    for precision, bits in BITS.items():
        emulated = DEFAULT.get(platform) != precision
        coarse = (
            errors("cpu", transform=partial(with_rounded_products, *bits))
            if emulated
            else errors(precision=precision)
        )
        for group, error in coarse.items():
            yield PrecisionError(name, platform, precision, emulated, group, error, highest[group])


def largest_error(group: str, ours: Arrays, oracle: Arrays) -> float:
    """The largest relative error among the group's tensors."""
    return max(relative_errors(ours, oracle, negligible="gradient" in group).values())


def in_full_float32(problem: Problem) -> Problem:
    """The problem with numbers that the coarser formats do not have: up to 1/256 smaller."""
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


def with_rounded_products(
    exponent_bits: int, mantissa_bits: int, function: Callable[..., Any]
) -> Callable[..., Any]:
    """The function with the float32 operands of all its matrix products rounded to these bits."""

    def rounded(x: jax.Array) -> jax.Array:
        return (
            lax.reduce_precision(x, exponent_bits, mantissa_bits) if x.dtype == jnp.float32 else x
        )

    def with_rounding(*args):
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        results = _evaluate(rounded, closed, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return with_rounding


def _evaluate(rounded: Callable, closed: ClosedJaxpr, *args: Any) -> list[Any]:
    jaxpr = closed.jaxpr
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        if equation.primitive.name in PRODUCTS:
            operands = [rounded(x) for x in operands]
        params = equation.params
        if equation.primitive.name != KERNEL:
            params = jax.tree.map(
                partial(_rewritten, rounded),
                params,
                is_leaf=lambda param: isinstance(param, Jaxpr | ClosedJaxpr),
            )
        elif any(product["precision"] != FULL for product in _products(params["jaxpr"])):
            raise NotImplementedError("a product in a Pallas kernel that leaves its precision open")
        params = equation.primitive.get_bind_params(params)
        results = equation.primitive.bind(*operands, **params)
        values |= zip(
            equation.outvars,
            results if equation.primitive.multiple_results else [results],
            strict=True,
        )
    return [read(atom) for atom in jaxpr.outvars]


def _products(jaxpr: Jaxpr) -> Iterator[dict[str, Any]]:
    """What the products of a body say of themselves."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in PRODUCTS:
            yield equation.params
        for param in jax.tree.leaves(
            equation.params, is_leaf=lambda param: isinstance(param, Jaxpr | ClosedJaxpr)
        ):
            if isinstance(param, ClosedJaxpr):
                yield from _products(param.jaxpr)
            elif isinstance(param, Jaxpr):
                yield from _products(param)


def _rewritten(rounded: Callable, param: Any) -> Any:
    """The body of a loop, a branch or a call, rounded too."""
    if isinstance(param, ClosedJaxpr):
        return jax.make_jaxpr(partial(_evaluate, rounded, param))(*param.in_avals)
    if not isinstance(param, Jaxpr):  # in jax 0.12 the two are one class
        return param
    closed = _rewritten(rounded, ClosedJaxpr(param, ()))
    if closed.consts:
        raise NotImplementedError("a product in a body that holds constants")
    return closed.jaxpr
