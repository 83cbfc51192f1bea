"""Decisions of a JAX program in float64: integers, masks and roundings of real numbers.

They are made from the same numbers as those of torch; `bounds/torch_decisions.py` says from which.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import Literal

from parity_tests.engine.bounds.tolerance import DECISION_BITS
from parity_tests.engine.candidates.jax_program import DOUBLE, DOUBLE_OF_HALF, DRAWS, bodies_in
from parity_tests.engine.problem import is_inexact

COARSER = {*DOUBLE, *DOUBLE_OF_HALF}
NARROW = {wide: narrow for narrow, wide in DOUBLE.items()}
BIT_PATTERNS = ("bitcast_convert_type", "nextafter")
ROUNDINGS = ("ceil", "floor", "round")
"""Decisions whose results are real numbers."""
ARITHMETIC = ("add", "add_any", "sub", "mul", "div", "sqrt")
"""Elementwise operations whose results IEEE 754 determines."""
MOVES = (
    *("abs", "broadcast_in_dim", "clamp", "concatenate", "convert_element_type", "copy", "copy_p"),
    *("dynamic_slice", "dynamic_update_slice", "gather", "imag", "iota", "max", "min", "neg"),
    *("optimization_barrier", "pad", "real", "reduce_max", "reduce_min", "reshape", "rev"),
    *("select_n", "slice", "sort", "squeeze", "stop_gradient", "tell", "top_k", "transpose"),
)
"""Operations that do not round: they only move, choose or negate numbers."""


class Written(NamedTuple):
    """A number as a user's program computes it, with x64 off."""

    value: Any
    is_discrete: bool
    """Whether the number depends on integers and constants alone."""


class Decisions:
    """Makes the decisions of a program whose other numbers are evaluated in float64."""

    def __init__(self):
        self._written: dict[Any, Written] = {}

    def forget(self, atoms: Iterable[Any]) -> None:
        """Forgets the numbers of these variables."""
        for variable in atoms:
            if not isinstance(variable, Literal):
                self._written.pop(variable, None)

    def pass_on(self, atoms: Sequence[Any], variables: Sequence[Any]) -> None:
        """Passes the numbers of atoms on to the variables of a body that is called or returns."""
        for atom, variable in zip(atoms, variables, strict=True):
            written = self._of(atom)
            self.forget([variable])
            if written is not None:
                self._written[variable] = written

    def keep_constant(self, variable: Any, value: Any) -> None:
        """Keeps the number of a constant."""
        if is_inexact(variable.aval) and not isinstance(value, Tracer):
            self._written[variable] = _constant(variable, value)

    def apply(
        self, run: Callable[[Any, list[Any]], Sequence[Any]], equation: Any, operands: list[Any]
    ) -> Sequence[Any]:
        """The results of an operation that `run` runs in float64, with its decisions."""
        results, written = run(equation, operands), self._as_written(equation, operands)
        is_decision = [equation.primitive.name in ROUNDINGS or not is_inexact(x) for x in results]
        has_decisions = any(map(is_inexact, operands)) and any(is_decision)
        if has_decisions and _is_repeatable(equation):
            if written is None:
                decided = run(equation, [*map(read, operands)])
            else:
                decided = [v.astype(x.dtype) for v, x in zip(written[0], results, strict=True)]
            choices = zip(is_decision, decided, results, strict=True)
            results = [one if is_chosen else other for is_chosen, one, other in choices]
        self.forget(equation.outvars)
        if written is not None:
            for variable, value in zip(equation.outvars, written[0], strict=True):
                if str(value.dtype) in COARSER and value.shape == variable.aval.shape:
                    self._written[variable] = Written(value, written[1])
        return results

    def _of(self, atom: Any) -> Written | None:
        if not isinstance(atom, Literal):
            return self._written.get(atom)
        return _constant(atom, atom.val) if is_inexact(atom.aval) else None

    def _as_written(
        self, equation: Any, operands: Sequence[Any]
    ) -> tuple[Sequence[Any], bool] | None:
        """The results in a user's own dtypes, and whether they are discrete, if known."""
        name, params, results = equation.primitive.name, equation.params, equation.outvars
        places = [i for i, atom in enumerate(equation.invars) if is_inexact(atom.aval)]
        has_results = any(is_inexact(variable.aval) for variable in results)
        if not (places or has_results):
            return None
        known: list[Any] = [self._of(equation.invars[i]) for i in places]
        if name == "convert_element_type" and known == [None]:
            is_cast = str(params["new_dtype"]) in COARSER
            return ([operands[0].astype(params["new_dtype"])], False) if is_cast else None
        if not has_results and any(each and not each.is_discrete for each in known):
            # a decision between a number that is cast and others, which are in float32 for a user
            known = [
                each or Written(operands[i].astype(_narrow(equation.invars[i])), is_discrete=False)
                for i, each in zip(places, known, strict=True)
            ]
        if None in known:
            return None
        is_discrete = all(each.is_discrete for each in known)
        if name == "tell":
            return [known[0].value], is_discrete
        keeps = name in (*MOVES, *ARITHMETIC, *ROUNDINGS)
        if not (is_discrete or keeps or not has_results) or not _is_repeatable(equation):
            return None
        given = [*operands]
        for i, each in zip(places, known, strict=True):
            given[i] = each.value
        if is_discrete:
            params = {key: _narrow_param(value) for key, value in params.items()}
        with contextlib.suppress(TypeError, ValueError, NotImplementedError):
            values = equation.primitive.bind(*given, **equation.primitive.get_bind_params(params))
            return values if equation.primitive.multiple_results else [values], is_discrete
        return None


def read(operand: Any) -> Any:
    """The number from which a decision is made, for an operand in float64."""
    if not (is_inexact(operand) and operand.dtype == jnp.float64):
        return operand
    rounded = lax.reduce_precision(operand, jnp.finfo(operand.dtype).nexp, DECISION_BITS)
    return jnp.where(jnp.abs(operand) < 2.0**DECISION_BITS, rounded, operand)


def _is_repeatable(equation: Any) -> bool:
    """True if an operation may run again on other numbers."""
    is_excluded = equation.primitive.name in (*BIT_PATTERNS, *DRAWS, "tell")
    return not (is_excluded or equation.effects or any(bodies_in(equation.params)))


def _constant(atom: Any, value: Any) -> Written:
    with np.errstate(over="ignore"):  # the largest number of float64, for example
        return Written(np.asarray(value).astype(_narrow(atom)), is_discrete=True)


def _narrow(atom: Any) -> Any:
    """The dtype of an array of the program with x64 off."""
    return NARROW.get(str(atom.aval.dtype), atom.aval.dtype)


def _narrow_param(value: Any) -> Any:
    is_dtype = isinstance(value, np.dtype | type) and str(np.dtype(value)) in NARROW
    return np.dtype(NARROW[str(np.dtype(value))]) if is_dtype else value
