"""Finds casts to coarser dtypes, rounded constants and random numbers in a JAX program.

`torch_rounding.InFloat64` does the same for torch. Because the float64 run then ignores casts to
float32 on both sides, even a fault far below float32's rounding is found.
"""

import dataclasses
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Literal
from jax.extend.source_info_util import summarize

DOUBLE = {"float32": "float64", "complex64": "complex128"}
DOUBLE_OF_HALF = {"bfloat16": "float64", "float16": "float64"}
BODIES = ("jaxpr", "call_jaxpr")
CALLS = ("jit", "closed_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call")
"""Operations that only run a body. Their custom derivatives are no longer needed, because
derivatives are taken before a program is rewritten.
"""
DRAWS = ("random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform")
ENGINE = str(Path(__file__).parents[1])
STANDARD = sysconfig.get_path("stdlib")


def wider_dtypes(casts_of_torch: set[str]) -> dict[str, str]:
    """The replacement for each dtype. Half precision is replaced if the torch side casts to it."""
    return DOUBLE | {half: to for half, to in DOUBLE_OF_HALF.items() if half in casts_of_torch}


@dataclasses.dataclass
class ProgramFacts:
    """Facts about a traced computation that a report should mention."""

    casts: list[str] = dataclasses.field(default_factory=list)
    """The lines that cast values which depend on the arguments from float64 to a coarser dtype."""
    draws: list[str] = dataclasses.field(default_factory=list)
    """The lines that draw random numbers."""
    coarse_operations: list[str] = dataclasses.field(default_factory=list)
    """Operations, such as kernels, that stay in a coarser dtype whatever their inputs are."""
    dtypes: dict[tuple[str, str], Any] = dataclasses.field(default_factory=dict)
    """The dtypes of the results without rewriting, by group and name."""
    constants: list[np.ndarray] = dataclasses.field(default_factory=list)
    """The constants that are rounded to float32, as float64 arrays."""
    has_padding_gradient: bool = False
    """Whether an embedding has a gradient in a row for which torch computes none."""
    x64_error: str = ""
    """The error that tracing with x64 raises, if the program had to be traced without x64."""


def place_of(equation: Any) -> str:
    """The line of an operation, and the line of the user's code that led to it; "" if unknown."""
    nearest = str(summarize(equation.source_info)).removesuffix("unknown")
    frames = getattr(equation.source_info.traceback, "frames", None) or ()
    if is_library(nearest):
        for frame in frames:
            if not is_library(frame.file_name) and frame.file_name.endswith(".py"):
                return f"{nearest}, from {frame.file_name}:{frame.line_num}"
    return nearest


def is_library(place: str) -> bool:
    """True if the line belongs to an installed package, the standard library or this engine."""
    place, *_ = place.partition(", from ")
    return any(part in place for part in ("site-packages", ENGINE, STANDARD))


def first_of(places: Iterable[str]) -> str:
    """The first of some lines of code, shortened, and the number of the others."""
    first, *others = dict.fromkeys(re.sub(r"\S*site-packages/", "", place) for place in places)
    return first + (f", and {len(others)} more" if others else "")


def collect_facts(closed: ClosedJaxpr, facts: ProgramFacts) -> None:
    """Adds the casts and random draws of a program, including its inner bodies, to `facts`."""
    for equation, varies, place in equations_in(closed.jaxpr, [True] * len(closed.jaxpr.invars)):
        name = equation.primitive.name
        if name == "convert_element_type" and varies:
            old, new = equation.invars[0].aval.dtype, equation.params["new_dtype"]
            widest = {*DOUBLE} if facts.x64_error else {*DOUBLE.values()}
            coarser = {*DOUBLE, *DOUBLE_OF_HALF} - widest
            if str(old) in widest and str(new) in coarser and ENGINE not in place:
                facts.casts.append(f"{old} to {new} at {place}")
        elif name in DRAWS:
            facts.draws.append(place)
    facts.casts = [*dict.fromkeys(facts.casts)]
    facts.draws = [*dict.fromkeys(facts.draws)]


def equations_in(
    jaxpr: Any, inputs_vary: Sequence[bool], place: str = ""
) -> Iterator[tuple[Any, bool, str]]:
    """Each equation of a body and its inner bodies, its dependence on an argument, and its place.

    A body that JAX has cached from an earlier trace has no line numbers, so its caller's place is
    used.
    """
    vary = {v for v, varies in zip(jaxpr.invars, inputs_vary, strict=True) if varies}
    for equation in jaxpr.eqns:
        operands = [v in vary if not isinstance(v, Literal) else False for v in equation.invars]
        varies = any(operands)
        if varies:
            vary.update(equation.outvars)
        here = place_of(equation) or place
        yield equation, varies, here
        for body, _ in bodies_in(equation.params):
            has_same_operands = equation.primitive.name in CALLS and len(body.invars) == len(
                operands
            )
            yield from equations_in(
                body, operands if has_same_operands else [varies] * len(body.invars), here
            )


def bodies_in(params: Mapping[str, Any]) -> Iterator[tuple[Any, Sequence[Any]]]:
    """The bodies among the parameters of an operation, and their constants."""
    for leaf in jax.tree.leaves(params, is_leaf=lambda p: hasattr(p, "eqns")):
        if hasattr(leaf, "eqns"):
            yield getattr(leaf, "jaxpr", leaf), getattr(leaf, "consts", ())


def constants_in(jaxpr: Any, consts: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """The constants of a body and of its inner bodies, in order."""
    yield from (
        (atom, value)
        for atom, value in zip(jaxpr.constvars, consts, strict=False)
        if not isinstance(value, Tracer) and hasattr(atom.aval, "dtype")
    )
    for equation in jaxpr.eqns:
        for atom in equation.invars:
            if isinstance(atom, Literal) and hasattr(atom.aval, "dtype"):
                yield atom, atom.val
        for body, inner in bodies_in(equation.params):
            yield from constants_in(body, inner)


def last_uses(jaxpr: Any) -> list[set[Any]]:
    """For each equation of a body, the variables that no later equation needs."""
    needed, unneeded = {v for v in jaxpr.outvars if not isinstance(v, Literal)}, []
    for equation in reversed(jaxpr.eqns):
        variables = {v for v in (*equation.invars, *equation.outvars) if not isinstance(v, Literal)}
        unneeded.append(variables - needed)
        needed |= variables
    return unneeded[::-1]


def called_body(equation: Any) -> Any:
    """The body of an operation that only runs a body; None for any other operation."""
    if equation.primitive.name not in CALLS:
        return None
    return next((equation.params[key] for key in BODIES if key in equation.params), None)
