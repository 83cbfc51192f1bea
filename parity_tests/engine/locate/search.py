"""Arrays of the torch side among all that the JAX side computes, whatever their names.

So a function without modules is compared with a torch module's submodules, and so are the parts of
a module that have no counterpart of their own.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.interpreters.partial_eval import dce_jaxpr

from parity_tests.engine.candidates.jax_program import called_body, last_uses
from parity_tests.engine.locate.agree import difference, layouts
from parity_tests.engine.locate.record import Call, tell_p

SIMILAR = 0.9
"""The cosine from which an array may be another with a fault."""


def watched(function: Callable[..., Any], tell: Callable[[np.ndarray], None]) -> Callable[..., Any]:
    """The function; each floating array that it computes for its results is told."""

    def run(*args):
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        needed, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
        given = [_told(leaf, tell) for leaf in jax.tree.leaves(args)]
        results = _run(needed, closed.consts, given, tell)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def _run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], tell: Callable) -> list[Any]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    uses = Counter((a, e.primitive.name) for e in jaxpr.eqns for a in {*_variables(e.invars)})
    added = {a for a, name in uses if name == "add_any"}
    added -= {a for a, name in uses if name != "add_any"} | {*_variables(jaxpr.outvars)}
    for equation, unneeded in zip(jaxpr.eqns, last_uses(jaxpr), strict=True):
        operands = [read(atom) for atom in equation.invars]
        if (body := called_body(equation)) is not None:
            inner, inner_consts = getattr(body, "jaxpr", body), getattr(body, "consts", ())
            results = _run(inner, inner_consts, operands, tell)
        else:
            params = equation.primitive.get_bind_params(equation.params)
            results = equation.primitive.bind(*operands, **params)
            results = results if equation.primitive.multiple_results else [results]
            results = [
                _told(result, partial(tell, is_summand=True) if variable in added else tell)
                for variable, result in zip(equation.outvars, results, strict=True)
            ]
        values |= zip(equation.outvars, results, strict=True)
        for variable in unneeded:
            del values[variable]
    return [read(atom) for atom in jaxpr.outvars]


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _told(x: Any, tell: Callable) -> Any:
    is_array = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating) and x.size
    return tell_p.bind(x, tell=tell) if is_array else x


@dataclasses.dataclass
class Wanted:
    """An array that is looked for, how far the closest is off, and whether one is similar."""

    array: np.ndarray
    givers: list[Call]
    """The calls without parts that give it: of these it is of interest whether one is similar."""
    bound: float
    is_total: bool = False
    """True if only the summed gradient is meaningful."""
    error: float = np.inf
    similar: bool = False


class Search:
    """Looks at arrays as they come by."""

    def __init__(self, wanted: Sequence[Wanted]):
        self._by_size: dict[int, list[tuple[Wanted, np.ndarray, float]]] = {}
        for each in wanted:
            for form in {
                array.size: array for array in (each.array, without_repeats(each.array))
            }.values():
                norm = float(np.linalg.norm(form))
                self._by_size.setdefault(form.size, []).append((each, form, norm))

    def see(self, value: np.ndarray, *, is_summand: bool = False) -> None:
        """Is it one of those that are wanted, or like one?"""
        candidates = self._by_size.get(value.size, ())
        if not candidates:
            return
        value = np.asarray(value, float)
        with np.errstate(over="ignore"):  # an additive mask may have the least number of all
            norm = float(np.linalg.norm(value))
        if not np.isfinite(norm):
            return
        is_known = False
        for wanted, form, its_norm in candidates:
            is_near = abs(norm - its_norm) <= 1e3 * wanted.bound * its_norm
            if is_near and not (is_summand and wanted.is_total):
                found = difference(value, form, wanted.bound)
                wanted.error = min(wanted.error, np.inf if found is None else found.error)
                is_known |= found is not None and found.error <= wanted.bound
        for wanted, form, its_norm in () if is_known else candidates:
            if (
                wanted.givers
                and form.size > 1
                and not wanted.similar
                and wanted.error > wanted.bound
            ):
                least = SIMILAR * norm * its_norm
                each = (np.vdot(form, candidate) for _, candidate in layouts(value, form.shape))
                wanted.similar = any(product > least > 0 for product in each)


def without_repeats(x: np.ndarray) -> np.ndarray:
    """One of several equal slices of an axis, and of equal halves or pairs of the last axis.

    So a rotary embedding's cosines are the same for all rows, and for both halves of a head.
    """
    for axis in range(x.ndim):
        first = x.take([0], axis)
        x = first if (x == first).all() else x
    if x.ndim and x.shape[-1] % 2 == 0:
        middle = x.shape[-1] // 2
        for half, other in ((x[..., :middle], x[..., middle:]), (x[..., ::2], x[..., 1::2])):
            if (half == other).all():
                return half
    return x
