"""Arrays of the torch side among all that the JAX side computes, whatever their names.

So a function without modules is compared with a torch module's submodules, and so are the parts of
a module that have no counterpart of their own.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from parity_tests.engine.locate.agree import difference, layouts
from parity_tests.engine.locate.record import Call, tell_p

BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")
CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "remat2",
    "checkpoint",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_lin",
)
"""What only runs a body."""
SIMILAR = 0.7
"""The cosine from which an array may be another with a fault."""


def watched(function: Callable[..., Any], tell: Callable[[np.ndarray], None]) -> Callable[..., Any]:
    """The function; each floating array that it computes is told."""

    def run(*args):
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        given = [_told(leaf, tell) for leaf in jax.tree.leaves(args)]
        results = _run(closed.jaxpr, closed.consts, given, tell)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def _run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], tell: Callable) -> list[Any]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        body = next((equation.params[key] for key in BODIES if key in equation.params), None)
        if equation.primitive.name in CALLS and body is not None:
            inner, inner_consts = getattr(body, "jaxpr", body), getattr(body, "consts", ())
            results = _run(inner, inner_consts, operands, tell)
        else:
            params = equation.primitive.get_bind_params(equation.params)
            results = equation.primitive.bind(*operands, **params)
            results = results if equation.primitive.multiple_results else [results]
            results = [_told(result, tell) for result in results]
        values |= zip(equation.outvars, results, strict=True)
    return [read(atom) for atom in jaxpr.outvars]


def _told(x: Any, tell: Callable) -> Any:
    is_array = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating) and x.size > 1
    return tell_p.bind(x, tell=tell) if is_array else x


@dataclasses.dataclass
class Wanted:
    """An array that is looked for, how far the closest is off, and whether one is similar."""

    array: np.ndarray
    givers: list[Call]
    """The calls without parts that give it: of these it is of interest whether one is similar."""
    error: float = np.inf
    similar: bool = False

    def __post_init__(self):
        self.norm = float(np.linalg.norm(self.array))


class Search:
    """Looks at arrays as they come by."""

    def __init__(self, wanted: Sequence[Wanted], bound: float):
        self.wanted, self.bound = wanted, bound
        self._by_size: dict[int, list[Wanted]] = {}
        for each in self.wanted:
            self._by_size.setdefault(each.array.size, []).append(each)

    def see(self, value: np.ndarray) -> None:
        """Is it one of those that are wanted, or like one?"""
        candidates = self._by_size.get(value.size, ())
        if not candidates:
            return
        value = np.asarray(value, float)
        norm = float(np.linalg.norm(value))
        close = 1e3 * self.bound
        matches = [
            each
            for each in candidates
            if abs(norm - each.norm) <= close * each.norm and self._is(value, each)
        ]
        if not matches and np.isfinite(norm) and norm:
            for each in candidates:
                if each.givers and not each.similar and each.error > self.bound:
                    least = SIMILAR * norm * each.norm
                    each.similar = any(
                        np.vdot(each.array, candidate) > least
                        for _, candidate in layouts(value, each.array.shape)
                    )

    def _is(self, value: np.ndarray, wanted: Wanted) -> bool:
        if wanted.error > self.bound:
            found = difference(value, wanted.array, self.bound)
            if found is not None:
                wanted.error = min(wanted.error, found.error)
        return wanted.error <= self.bound
