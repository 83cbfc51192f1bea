"""Initializes parameters in their shardings, so that no device ever holds the whole model."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.sharding import Sharding


def compute_outputs(operations: ClosedJaxpr, outputs: Mapping[int, Sharding | None]) -> list[Any]:
    """Computes the outputs at these indices, each in its sharding. None: on the default device.

    The operations run one by one, as they would in Python. If XLA compiled all of them into one
    program, it would round differently, and would need minutes for a deep model. If a sharding
    divides an output, it also divides each operand of the same shape, so that most arrays are never
    whole on one device. Those whose shape changes on the way are, such as the factors of an
    orthogonal matrix.
    """
    jaxpr = operations.jaxpr
    results = [jaxpr.outvars[index] for index in outputs]
    divided = {
        result: sharding
        for result, sharding in zip(results, outputs.values(), strict=True)
        if sharding is not None and not sharding.is_fully_replicated
    }
    # Walk back from the outputs to find the operations that they need, and the operation that reads
    # a value last, after which it is freed.
    last_reader: dict[Var, JaxprEqn | None] = dict.fromkeys(_variables(results))
    needed = []
    for equation in reversed(jaxpr.eqns):
        if not any(output in last_reader for output in equation.outvars):
            continue
        needed.append(equation)
        sharding_of_shape = {x.aval.shape: divided.get(x) for x in equation.outvars}
        for operand in _variables(equation.invars):
            last_reader.setdefault(operand, equation)
            if (sharding := sharding_of_shape.get(operand.aval.shape)) is not None:
                divided.setdefault(operand, sharding)

    values = {
        constant: jax.device_put(value, divided.get(constant))
        for constant, value in zip(jaxpr.constvars, operations.consts, strict=True)
        if constant in last_reader
    }

    def read(variable: Any) -> Any:
        if isinstance(variable, Literal):
            return jnp.asarray(variable.val, variable.aval.dtype)  # pyright: ignore
        return values[variable]

    programs: dict[Any, Callable[..., Any]] = {}  # equal layers share them
    for equation in reversed(needed):
        run, shardings = _function(jaxpr, equation), [*map(divided.get, equation.outvars)]
        if any(shardings):
            options, types = equation.params.items(), (each.aval for each in equation.invars)
            key = (equation.primitive, *options, *types, *shardings)
            run = programs.setdefault(key, jax.jit(run, out_shardings=shardings))
        computed = zip(equation.outvars, run(*map(read, equation.invars)), strict=True)
        values |= {output: value for output, value in computed if output in last_reader}
        for operand in {*_variables(equation.invars)}:
            if last_reader[operand] is equation:
                del values[operand]
    return [*map(read, results)]


def _variables(atoms: Iterable[Any]) -> list[Any]:
    """The operands or results that are not literals."""
    return [each for each in atoms if not isinstance(each, Literal)]


def _function(jaxpr: Jaxpr, equation: JaxprEqn) -> Callable[..., Any]:
    """An operation as a function that returns a list."""
    operands = [Var(each.aval) for each in equation.invars]
    equation = equation.replace(invars=[*operands])
    alone = jaxpr.replace(constvars=[], invars=operands, outvars=equation.outvars, eqns=[equation])
    return jaxpr_as_fun(ClosedJaxpr(alone, []))
