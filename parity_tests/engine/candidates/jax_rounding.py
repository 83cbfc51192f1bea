"""Monte Carlo arithmetic in JAX: the counterpart of `torch_rounding.RandomRounding`.

Each number is computed twice, without and with rounding. Comparisons and indices use the numbers
without rounding, so that rounding does not send a computation down another branch.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from parity_tests.engine.bounds.tolerance import OPERATION_ULPS, ulp
from parity_tests.engine.candidates.evaluator import Evaluator
from parity_tests.engine.candidates.jax_decisions import MOVES, ROUNDINGS
from parity_tests.engine.candidates.jax_program import called_body
from parity_tests.engine.problem import is_inexact

BRANCHING = ("scan", "while", "cond")


class ExactAndRounded(NamedTuple):
    """A number without rounding, and the same number with rounding."""

    exact: Any
    rounded: Any


def exact_and_rounded(x: Any) -> Any:
    """A floating array twice; any other value unchanged."""
    return ExactAndRounded(x, x) if is_inexact(x) else x


class RoundingEvaluator(Evaluator):
    """Evaluates a program, and rounds the result of each operation to a dtype at random.

    The arguments are rounded, too, to the nearest numbers.
    """

    def __init__(self, dtype: str, seed: Any, *args: Any):
        super().__init__(*args)
        self._dtype, self._seed, self._count = dtype, seed, 0

    def evaluate(self, args: Sequence[Any]) -> list[Any]:
        """The program's results with rounding."""
        results = super().evaluate([round_to(self._dtype, x) if is_inexact(x) else x for x in args])
        return [x.rounded if isinstance(x, ExactAndRounded) else x for x in results]

    def _widen(self, x: Any) -> Any:
        if isinstance(x, ExactAndRounded):
            return ExactAndRounded(*map(super()._widen, x))
        return super()._widen(x)

    def _body(self, closed: Any) -> Callable[..., list[Any]]:
        body = super()._body(closed)
        return lambda *args: [*map(exact_and_rounded, body(*args))]

    def _equation(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        name = equation.primitive.name
        if name in BRANCHING:
            return super()._equation(equation, [*map(exact_and_rounded, operands)])
        if called_body(equation) is not None:
            return super()._equation(equation, operands)
        rounded, exact = (  # in this order, because the last decisions are kept
            super(RoundingEvaluator, self)._equation(equation, [_component(x, i) for x in operands])
            for i in (1, 0)
        )
        if name in ROUNDINGS:
            rounded = exact
        return [
            ExactAndRounded(x, y if name in (*MOVES, *ROUNDINGS) else self._round(y, operands))
            if is_inexact(x)
            else x
            for x, y in zip(exact, rounded, strict=True)
        ]

    def _round(self, x: Any, operands: Sequence[Any]) -> Any:
        if jnp.iscomplexobj(x):
            return lax.complex(self._round(x.real, operands), self._round(x.imag, operands))
        if x.dtype != jnp.float64:  # computed in another dtype, whatever the inputs
            return x
        numbers = filter(is_inexact, [_component(each, 1) for each in operands])
        are_short = (
            self._dtype != "float64"
            or jnp.asarray([(round_to("bfloat16", n) == n).all() for n in numbers]).all()
        )
        self._count += 1
        return randomly_rounded(
            self._dtype, x, are_short, jnp.asarray(self._seed, jnp.uint64), self._count
        )


def _component(x: Any, i: int) -> Any:
    return x[i] if isinstance(x, ExactAndRounded) else x


def round_to(dtype: str, x: jax.Array) -> jax.Array:
    """The numbers, rounded to a dtype, but still in their own."""
    if jnp.iscomplexobj(x):
        return lax.complex(round_to(dtype, x.real), round_to(dtype, x.imag))
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)


@partial(jax.jit, static_argnums=0)
def randomly_rounded(dtype: str, x: jax.Array, are_short: Any, seed: Any, count: Any) -> jax.Array:
    """The float64 numbers rounded to a dtype; those that it cannot represent are perturbed first.

    For float64 itself, a number is kept if bfloat16 represents it and the operands (`are_short`).
    The random perturbation depends on the seed, the operation, the place and the number.
    """
    is_kept = round_to("bfloat16" if dtype == "float64" else dtype, x) == x
    place = lax.iota(jnp.uint64, x.size).reshape(x.shape)
    key = _hash(seed ^ _hash(jnp.asarray(count, jnp.uint64)))
    bits = _hash(lax.bitcast_convert_type(x, jnp.uint64) + _hash(place ^ key))
    noise = (bits >> 11).astype(jnp.float64) * 2.0**-52 - 1
    rounded = round_to(dtype, x * (1 + OPERATION_ULPS * ulp(dtype) * noise))
    return jnp.where(is_kept & are_short, x, rounded)


def _hash(bits: jax.Array) -> jax.Array:
    """A hash of 64 bits (SplitMix64's finalizer)."""
    bits = bits + jnp.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> 30)) * jnp.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> 27)) * jnp.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> 31)
