"""Run a JAX side, forward and backward."""

import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_models.weights.constant import Constant
from jax_models.weights.trees import is_floating
from parity_tests.engine.candidates.jax_program import Found, lifted_dtypes, look_into
from parity_tests.engine.candidates.jax_rounding import Rounded
from parity_tests.engine.candidates.lift import (
    ArgumentFree,
    Lift,
    PartialLift,
    rewritten,
    traced,
)
from parity_tests.engine.problem import Problem, arrays, in_dtype, is_flag
from parity_tests.engine.results import (
    GROUPS,
    Results,
    aligned,
    cotangents,
    grouped,
    only_floating,
    without_padding,
)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Fixed:
    """A leaf that is not an array, which is static in a compiled function."""

    value: Any

    def __eq__(self, other: object) -> bool:
        """True if both hold the same value; 1 and True differ."""
        if not isinstance(other, Fixed) or type(self.value) is not type(other.value):
            return False
        return self.value is other.value or (is_flag(self.value) and self.value == other.value)

    def __hash__(self) -> int:
        """A flag is hashed by its value, anything else by its identity."""
        return hash((type(self.value), self.value if is_flag(self.value) else id(self.value)))


def fixed(tree: Any) -> Any:
    """The tree with each leaf that is not an array wrapped in `Fixed`."""
    return jax.tree.map(lambda leaf: leaf if hasattr(leaf, "dtype") else Fixed(leaf), tree)


def unfixed(tree: Any) -> Any:
    """The tree that `fixed` was given."""

    def is_fixed(node: Any) -> bool:
        return isinstance(node, Fixed)

    return jax.tree.map(lambda n: n.value if is_fixed(n) else n, tree, is_leaf=is_fixed)


@dataclasses.dataclass(frozen=True)
class Traced:
    """The settings for which a function is compiled, beside the shapes of its arguments."""

    dtype: str
    names: tuple[tuple[str, str], ...]
    """The group and name of each of the oracle's results."""
    lifted: tuple[tuple[str, str], ...]
    """The dtypes that are replaced, and by what."""
    backward: bool


class JaxSide:
    """A problem's JAX side, compiled once per dtype for all weights and inputs of its shapes.

    `evaluator` evaluates the program of the whole forward and backward pass.
    float64 runs under x64 and ignores casts to float32. The other dtypes run without x64, so that
    nothing is promoted further than in a user's program. `rounding` is the dtype to which results
    of float64 operations are rounded at random.
    """

    def __init__(
        self,
        problem: Problem,
        platform: str = "cpu",
        *,
        precision: str = "highest",
        evaluator: Callable[..., Lift] = Lift,
        rounding: str | None = None,
    ):
        self._call, self._evaluator, self._rounding = problem.call, evaluator, rounding
        self._to_torch = problem.gradient_to_torch or problem.to_torch
        self._device, self._precision = jax.devices(platform)[0], precision
        self._compiled = jax.jit(self._forward_and_backward, static_argnums=0)
        self.found: dict[str, Found] = {}
        """What was found when the program for a dtype was compiled."""

    def run(
        self,
        problem: Problem,
        dtype: str,
        oracle: Results,
        casts_of_torch: Sequence[str] = (),
        noise: int = 0,
    ) -> Results:
        """The results under the oracle's names, and the gradients for the same random cotangents.

        The problem is the one that was compiled, with any weights, inputs and seed. Gradients are
        left out if the oracle has none, or if the results and the oracle differ in their shapes.
        `casts_of_torch` are the dtypes that the torch side casts to in float64. `noise` is the seed
        of random rounding.
        """
        with self._settings(dtype):
            differentiated, given = self._arguments(problem, dtype)
            given_back = [jnp.asarray(in_dtype(c, dtype)) for c in cotangents(problem.seed, oracle)]
            traced = Traced(
                dtype,
                tuple((group, name) for group in GROUPS[:2] for name in oracle.get(group, {})),
                tuple(lifted_dtypes({*casts_of_torch}).items()) if dtype == "float64" else (),
                "input gradient" in oracle,
            )
            groups, gradients = jax.device_get(
                self._compiled(traced, noise, differentiated, given, given_back)
            )
        results = Results({group: dict(named) for group, named in groups.items()})
        if gradients is None:
            return results
        weight_gradients, input_gradients = gradients
        results["input gradient"] = dict(
            zip(oracle["input gradient"], jax.tree.leaves(input_gradients), strict=True)
        )
        if self._to_torch is not None:
            by_key = self._to_torch(_merge(weight_gradients, given[1]))
            # A key that no parameter holds has no influence on the results.
            results["weight gradients"] = {
                name: by_key.get(name, np.zeros_like(gradient))
                for name, gradient in oracle["weight gradients"].items()
            }
            self.found[dtype].padding |= without_padding(results, oracle.padding)
        return results

    def shapes(self, problem: Problem) -> tuple[Results, Found]:
        """Zeros in the shapes of the float64 result, and what was found on the way."""
        with self._settings("float64"):
            found = Found()
            closed, groups, _ = self._traced(problem, found)
            look_into(closed, found)
        zeros = {
            group: {n: np.broadcast_to(np.zeros((), s.dtype), s.shape) for n, s in named.items()}
            for group, named in groups.items()
        }
        return Results(zeros), found

    def argument_free(self, problem: Problem) -> list[np.ndarray]:
        """The arrays of the float64 forward pass that depend on no input and no weight."""
        with self._settings("float64"):
            closed, *_ = self._traced(problem, Found())
            return ArgumentFree(closed, lifted_dtypes(set())).arrays()

    def compute_weights(self, problem: Problem) -> None:
        """Run the part of the float64 forward pass that depends on weights but on no input."""
        with self._settings("float64"):
            closed, _, ((weights, floating), (held, rest, others)) = self._traced(problem, Found())
            inputs = {*map(id, jax.tree.leaves((floating, others)))}
            leaves = jax.tree.leaves(((weights, floating), (held, rest, others)))
            given = [None if id(leaf) in inputs else leaf for leaf in leaves]
            PartialLift(closed, {}, Found()).evaluate(given)

    def _traced(self, problem: Problem, found: Found) -> tuple[Any, Any, tuple[Any, Any]]:
        differentiated, given = self._arguments(problem, "float64")
        made_for = Traced("float64", (), (), backward=False)
        forward = partial(self._forward, traced=made_for, found=found)
        closed, (_, groups) = traced(forward, (differentiated, given), found)
        return closed, groups, (differentiated, given)

    @contextlib.contextmanager
    def _settings(self, dtype: str) -> Iterator[None]:
        with (
            jax.enable_x64(dtype == "float64"),
            jax.default_device(self._device),
            jax.default_matmul_precision(self._precision),
        ):
            yield

    def _arguments(
        self, problem: Problem, dtype: str
    ) -> tuple[tuple[Any, Any], tuple[Any, Any, Any]]:
        """The arguments that are differentiated, and the others."""
        weights, rest = _split(problem.build(problem.state_dict, dtype))
        floating, others = _partition(fixed(arrays(problem.inputs, dtype)))
        differentiated = (None if self._to_torch is None else weights, floating)
        return differentiated, (weights if self._to_torch is None else None, rest, others)

    def constants_of(self, problem: Problem) -> list[np.ndarray]:
        """The constants of the float64 run: those that a module holds, then those of its code."""
        with jax.enable_x64(True):
            held = _held(_split(problem.build(problem.state_dict, "float64"))[1])
        return [*map(np.asarray, held), *self.found["float64"].constants]

    def _forward_and_backward(self, traced: Traced, noise: Any, *args):
        found = self.found[traced.dtype] = Found()
        evaluator = self._evaluator
        if self._rounding is not None:
            evaluator = partial(Rounded, self._rounding, noise)

        def function(differentiated, given, cotangents):
            def forward(differentiated):
                return self._forward(differentiated, given, traced, found)

            if not traced.backward:
                return forward(differentiated)[1], None
            outputs, pullback, groups = jax.vjp(forward, differentiated, has_aux=True)
            if [y.shape for y in outputs] != [c.shape for c in cotangents]:
                return groups, None
            # torch's gradients are the complex conjugates of JAX's
            cast = [
                jnp.conj(jnp.asarray(c, y.dtype))
                if jnp.iscomplexobj(c)
                else jnp.asarray(c, y.dtype)
                for c, y in zip(cotangents, outputs, strict=True)
            ]
            return groups, jax.tree.map(jnp.conj, pullback(cast)[0])

        return rewritten(function, dict(traced.lifted), found, evaluator)(*args)

    def _forward(self, differentiated, given, traced: Traced, found: Found):
        """The floating leaves of the results, and all leaves by group and name."""
        (weights, floating), (constants, rest, others) = differentiated, given
        model = _merge(constants if weights is None else weights, rest)
        inputs = jax.tree.map(
            lambda x, n: n if x is None else x, floating, others, is_leaf=lambda x: x is None
        )
        groups = aligned(
            grouped(self._call(model, *unfixed(inputs)), "JAX", as_array), traced.names
        )
        found.dtypes = {
            (group, name): leaf.dtype
            for group, named in groups.items()
            for name, leaf in named.items()
        }
        ordered = OrderedDict((group, OrderedDict(named)) for group, named in groups.items())
        return [
            leaf for named in groups.values() for leaf in only_floating(named).values()
        ], ordered


def _split(built: Any) -> tuple[Any, Any]:
    """The weights, and the rest of an NNX module."""
    if not isinstance(built, nnx.Module):
        return fixed(built), None
    graphdef, weights, rest = nnx.split(built, nnx.Param, ...)
    return weights, (graphdef, rest)


def is_constant(leaf: Any) -> bool:
    """True for a floating array of an NNX module that is neither a weight nor a statistic."""
    known = nnx.Param | nnx.BatchStat | Constant
    value = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
    return not isinstance(leaf, known) and is_floating(value)


def _held(rest: Any) -> list[Any]:
    """The constants that an NNX module holds."""
    if rest is None:
        return []
    leaves = jax.tree.leaves(rest[1], is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return [
        leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        for leaf in leaves
        if is_constant(leaf)
    ]


def _merge(weights: Any, rest: Any) -> Any:
    return unfixed(weights) if rest is None else nnx.merge(rest[0], weights, rest[1], copy=True)


def _partition(tree: Any) -> tuple[Any, Any]:
    """The floating leaves and the other leaves, as two trees with None where a leaf is left out."""
    differentiable = jax.tree.map(lambda x: jnp.issubdtype(x.dtype, jnp.inexact), tree)
    return (
        jax.tree.map(lambda x, keep: x if keep else None, tree, differentiable),
        jax.tree.map(lambda x, drop: None if drop else x, tree, differentiable),
    )


def as_array(leaf: Any) -> Any:
    """The leaf as an array; None if it is not one."""
    is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic)
    return jnp.asarray(leaf) if is_array or type(leaf) in (bool, int, float) else None
