"""Evaluates a JAX program with other dtypes, so that its casts to float32 have no effect."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Literal

from jax_models.weights.trees import is_floating
from parity_tests.engine.bounds.rounded_constants import Digits, is_rounded, short_decimal
from parity_tests.engine.candidates.jax_decisions import BIT_PATTERNS, Decisions
from parity_tests.engine.candidates.jax_program import (
    ProgramFacts,
    bodies_in,
    called_body,
    collect_facts,
    constants_in,
    equations_in,
    last_uses,
    place_of,
    wider_dtypes,
)

SCATTERS = ("scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter-sub")


class Evaluator:
    """Evaluates a program with some dtypes, and the digits of its constants, replaced by others.

    If dtypes are replaced, decisions are made as `jax_decisions.py` says.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        dtypes: Mapping[str, str],
        facts: ProgramFacts,
        digits: Digits = lambda values: values,
    ):
        self._closed, self._dtypes, self._facts, self._digits = closed, dtypes, facts, digits
        self._decisions = Decisions()
        constants = {id(atom): (atom, a) for atom, a in constants_in(closed.jaxpr, closed.consts)}
        numbers = [
            self._exact_decimal(a) for atom, a in constants.values() if is_floating(atom.aval)
        ]
        facts.constants = [each for each in numbers if dtypes and is_rounded(each).any()]

    def evaluate(self, args: Sequence[Any]) -> list[Any]:
        """The results of the program."""
        return self._run(self._closed.jaxpr, self._closed.consts, args)

    def _run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        values = dict(zip(jaxpr.invars, map(self._widen, args), strict=True))
        for atom, value in zip(jaxpr.constvars, consts, strict=True):
            values[atom] = self._constant(atom, value)
            self._decisions.keep_constant(atom, value)

        def read(atom: Any) -> Any:
            return self._constant(atom, atom.val) if isinstance(atom, Literal) else values[atom]

        for equation, unneeded in zip(jaxpr.eqns, last_uses(jaxpr), strict=True):
            operands = [read(atom) for atom in equation.invars]
            results = self._equation(equation, operands)
            values |= zip(equation.outvars, map(self._widen, results), strict=True)
            for variable in unneeded:
                del values[variable]
            self._decisions.forget(unneeded)
        return [read(atom) for atom in jaxpr.outvars]

    def _widen(self, x: Any) -> Any:
        dtype = self._dtypes.get(str(getattr(x, "dtype", None)))
        return x if dtype is None else lax.convert_element_type(x, dtype)

    def _constant(self, atom: Any, value: Any) -> Any:
        dtype = getattr(atom.aval, "dtype", None)
        if dtype is None or isinstance(value, Tracer) or jnp.issubdtype(dtype, jax.dtypes.extended):
            return self._widen(value)
        if not self._dtypes or not is_floating(atom.aval):
            return self._widen(jnp.asarray(value, dtype))
        wide = self._dtypes.get(str(dtype), dtype)
        return jnp.asarray(self._exact_decimal(value), wide)

    def _exact_decimal(self, value: Any) -> np.ndarray:
        """The value in float64; a short decimal, such as 1e-5, with all digits of float64."""
        short = short_decimal(value)
        return self._digits(np.asarray(value if short is None else short, np.float64))

    def _body(self, closed: Any) -> Callable[..., list[Any]]:
        jaxpr, consts = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
        return lambda *args: self._run(jaxpr, consts, args)

    def _equation(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        name, params = equation.primitive.name, equation.params

        # Evaluate the bodies of calls, loops and branches recursively.
        if (body := called_body(equation)) is not None:
            inner = getattr(body, "jaxpr", body)
            self._decisions.pass_on(equation.invars, inner.invars)
            results = self._body(body)(*operands)
            self._decisions.pass_on(inner.outvars, equation.outvars)
            self._decisions.forget(inner.outvars)
            return results
        if name == "scan":
            return self._scan(equation, operands)
        if name == "while":
            return self._while(params, operands)
        if name == "cond":
            index, *rest = operands
            return lax.switch(index, [self._body(branch) for branch in params["branches"]], *rest)
        if not self._dtypes:
            return self._operation(equation, operands)
        return self._decisions.apply(self._operation, equation, operands)

    def _operation(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        """The results of an operation that is no call, loop or branch."""
        name, params = equation.primitive.name, equation.params
        bodies = [body for body, _ in bodies_in(params)]

        # Leave an operation unchanged if it touches no dtype that is replaced.
        inner = (each for b in bodies for each, *_ in equations_in(b, [True] * len(b.invars)))
        atoms = (v for each in (equation, *inner) for v in (*each.invars, *each.outvars))
        if not any(map(self._is_replaced, atoms)):
            return self._bind(equation, operands, params)

        # Run any other operation in the new dtypes or, if that is impossible, in its own.
        if name in SCATTERS:
            scatter = getattr(lax, name.replace("-", "_"))
            names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
            return [scatter(*operands, **{key: params[key] for key in names})]
        if name == "reduce_precision" and self._keeps_precision(equation):
            return operands
        if name not in BIT_PATTERNS and not bodies:
            params_in_new_dtypes = {key: self._param(value) for key, value in params.items()}
            try:
                return self._bind(equation, operands, params_in_new_dtypes)
            except (TypeError, ValueError, NotImplementedError):
                pass
        return self._run_in_own_dtypes(equation, operands)

    def _is_replaced(self, atom: Any) -> bool:
        """True if the dtype of an array of the program is replaced."""
        return str(getattr(atom.aval, "dtype", None)) in self._dtypes

    def _run_in_own_dtypes(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        """The results of an operation in the original dtypes of the program."""
        name = equation.primitive.name
        if name not in BIT_PATTERNS:
            self._facts.coarse_operations.append(f"{name} at {place_of(equation)}")
        given = [
            lax.convert_element_type(x, atom.aval.dtype) if self._is_replaced(atom) else x
            for x, atom in zip(operands, equation.invars, strict=True)
        ]
        return self._bind(equation, given, equation.params)

    def _bind(self, equation: Any, operands: list[Any], params: Mapping[str, Any]) -> Sequence[Any]:
        x = operands[0] if equation.primitive is lax.slice_p else None
        if is_floating(x) and not isinstance(x, Tracer):
            # without jit, JAX would compile a program for each step of a loop over a sequence
            bounds = params["start_indices"], params["limit_indices"], params["strides"] or ()
            slices = itertools.starmap(slice, itertools.zip_longest(*bounds))
            return [jnp.asarray(np.asarray(x)[tuple(slices)])]
        results = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(params))
        return results if equation.primitive.multiple_results else [results]

    def _param(self, value: Any) -> Any:
        """A parameter of an operation, replaced if it is a dtype to replace."""
        is_dtype = isinstance(value, np.dtype | type) and str(np.dtype(value)) in self._dtypes
        return np.dtype(self._dtypes[str(np.dtype(value))]) if is_dtype else value

    def _keeps_precision(self, equation: Any) -> bool:
        """True if the operation rounds to the dtype that its operand already has."""
        info = jnp.finfo(equation.invars[0].aval.dtype)
        bits = equation.params["exponent_bits"], equation.params["mantissa_bits"]
        return bits == (info.nexp, info.nmant)

    def _scan(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        params = equation.params
        inner = params["jaxpr"]
        carried = _are_whole(equation.outvars, inner.out_avals).count(True)
        whole = _are_whole(equation.invars, inner.in_avals).count(True)
        const_count = whole - carried
        consts, init, xs = operands[:const_count], operands[const_count:whole], operands[whole:]
        body = self._body(inner)

        def step(carry, x):
            results = body(*consts, *carry, *x)
            return results[:carried], results[carried:]

        options = {key: params[key] for key in ("length", "reverse", "unroll")}
        last, ys = lax.scan(step, init, xs, **options)
        return [*last, *ys]

    def _while(self, params: Mapping[str, Any], operands: list[Any]) -> Sequence[Any]:
        cond_count, body_count = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, others = operands[:cond_count], operands[cond_count:]
        body_consts, init = others[:body_count], others[body_count:]
        condition, body = self._body(params["cond_jaxpr"]), self._body(params["body_jaxpr"])
        return lax.while_loop(
            lambda state: condition(*cond_consts, *state)[0],
            lambda state: body(*body_consts, *state),
            init,
        )


class PartialEvaluator(Evaluator):
    """Skips every operation that depends on an argument that is None."""

    def _equation(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        if called_body(equation) is None and any(x is None for x in operands):
            return [None] * len(equation.outvars)
        return super()._equation(equation, operands)


class ArgumentFreeEvaluator(PartialEvaluator):
    """Computes only values that depend on no argument, and collects their real numbers."""

    def __init__(self, closed: ClosedJaxpr, dtypes: Mapping[str, str]):
        super().__init__(closed, dtypes, ProgramFacts())
        self._arrays: list[np.ndarray] = []

    def arrays(self) -> list[np.ndarray]:
        """The distinct numbers of each array that depends on no argument."""
        self.evaluate([None] * len(self._closed.jaxpr.invars))
        return self._arrays

    def _widen(self, x: Any) -> Any:
        x = super()._widen(x)
        # Inside a loop or a branch, the numbers are not known; its results are collected.
        if is_floating(x) and not isinstance(x, Tracer):
            self._arrays.append(np.unique(np.asarray(x, np.float64)))
        return x

    def _constant(self, atom: Any, value: Any) -> Any:
        return self._widen(super()._constant(atom, value))


def _are_whole(outer: Sequence[Any], inner: Sequence[Any]) -> list[bool]:
    """For each array of a scan, whether the body takes or returns all of it rather than a slice."""
    return [len(v.aval.shape) == len(a.shape) for v, a in zip(outer, inner, strict=True)]


def trace_program(
    function: Callable[..., Any], args: Sequence[Any], facts: ProgramFacts
) -> tuple[ClosedJaxpr, Any]:
    """The function's program and the shapes of its results.

    A model that computes in float32 whatever its weights are may mix dtypes with x64 on: the carry
    of `nnx.LSTMCell`, for example, starts in float32 and would continue in float64. Such a model is
    traced with x64 off, as its users run it.
    """
    make = partial(jax.make_jaxpr, return_shape=True)
    try:
        return make(function)(*args)
    except Exception as error:  # a model may raise anything
        with jax.enable_x64(False):
            narrowed = partial(jax.dtypes.canonicalize_dtype, allow_extended_dtype=True)
            narrow = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, narrowed(x.dtype)), args)
            try:
                program = make(function)(*narrow)
            except Exception:
                raise error from None
        facts.x64_error = f"{type(error).__name__}: {error}".partition("\n")[0]
        return program


def with_dtypes(
    function: Callable[..., Any],
    dtypes: Mapping[str, str],
    facts: ProgramFacts,
    evaluator: Callable[..., Evaluator] = Evaluator,
) -> Callable[..., Any]:
    """The function with some dtypes replaced. Facts about its program are added to `facts`."""

    def run(*args):
        closed, shapes = trace_program(function, args, facts)
        collect_facts(closed, facts)
        replaced = {**wider_dtypes(set()), **dtypes} if facts.x64_error else dtypes
        leaves = [
            leaf.astype(aval.dtype) if jnp.issubdtype(aval.dtype, jnp.integer) else leaf
            for leaf, aval in zip(jax.tree.leaves(args), closed.in_avals, strict=True)
        ]
        results = evaluator(closed, replaced, facts).evaluate(leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run
