"""Runs the JAX side of a problem, forward and backward."""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_models.weights.trees import is_floating
from parity_tests.engine.bounds.rounded_constants import Digits, is_rounded
from parity_tests.engine.candidates.evaluator import (
    ArgumentFreeEvaluator,
    Evaluator,
    PartialEvaluator,
    trace_program,
    with_dtypes,
)
from parity_tests.engine.candidates.jax_program import ProgramFacts, collect_facts, wider_dtypes
from parity_tests.engine.candidates.jax_rounding import RoundingEvaluator
from parity_tests.engine.problem import Problem, arrays, in_dtype, is_flag, is_inexact
from parity_tests.engine.results import (
    GROUPS,
    Results,
    clear_padding_gradients,
    cotangents,
    leaves_by_group,
    only_floating,
    with_names_of,
)

Leaves = dict[int, Any]
"""Some leaves of a tree, by their index."""
QUICK = {"xla_backend_optimization_level": 0}
"""XLA's option to compile a program without optimizing it, which takes about half the time."""
MOST_QUICK = 2**22
"""The number of weights and inputs above which a program runs long enough to be optimized."""


class Arguments:
    """The leaves of a problem's weights, of the rest of its model, and of its inputs."""

    def __init__(self, problem: Problem, dtype: str, digits: Digits | None = None):
        tree = *problem.build(problem.state_dict, dtype), arrays(problem.inputs, dtype)
        leaves, structure = jax.tree.flatten(tree)
        weights, self.model_size = (len(jax.tree.leaves(tree[:count])) for count in (1, 2))
        if digits is not None:
            for i in filter(lambda i: is_floating(leaves[i]), range(weights, self.model_size)):
                leaves[i] = jnp.asarray(digits(np.asarray(leaves[i], np.float64)))
        if problem.to_torch is None:  # the gradients of weights would have no names
            weights = 0
        self.differentiated: Leaves = {}
        self.others: Leaves = {}
        constants: Leaves = {}
        for i, leaf in enumerate(leaves):
            if not hasattr(leaf, "dtype"):
                constants[i] = leaf
            elif is_inexact(leaf) and not weights <= i < self.model_size:
                self.differentiated[i] = leaf
            else:
                self.others[i] = leaf
        flags = [(i, type(x), x if is_flag(x) else id(x)) for i, x in constants.items()]
        shapes = [(i, x.shape, x.dtype) for i, x in (self.differentiated | self.others).items()]
        self.key = structure, len(self.differentiated), (*flags,), (*shapes,)
        """Equal for arguments for which the same program can run."""
        self.size = sum(leaf.size for leaf in (self.differentiated | self.others).values())
        """The number of all numbers."""

        def join(differentiated: Leaves, others: Leaves) -> tuple[Any, Any, Any]:
            all_leaves = {**constants, **others, **differentiated}
            return jax.tree.unflatten(structure, [all_leaves[i] for i in range(len(all_leaves))])

        self.join = join
        """Puts the differentiated leaves and the others back into the trees of the arguments."""


class JaxSide:
    """The JAX side of a problem, compiled once per dtype for all weights and inputs of its shapes.

    float64 runs with x64 on and ignores casts to float32. The other dtypes run with x64 off, so
    that nothing is promoted further than in a user's program.

    Args:
        problem: the problem, or one that differs from it only in weights, inputs and seed.
        platform: where JAX runs.
        precision: the precision of matrix products.
        evaluator: evaluates the program of the whole forward and backward pass.
        rounding: the dtype to which the results of float64 operations are rounded at random. It
            replaces `evaluator`. By default nothing is rounded.
        digits: replaces the constants of the model and of its program by others, in float64.

    """

    def __init__(
        self,
        problem: Problem,
        platform: str = "cpu",
        *,
        precision: str = "highest",
        evaluator: Callable[..., Evaluator] = Evaluator,
        rounding: str | None = None,
        digits: Digits | None = None,
    ):
        self._problem, self._rounding, self._digits = problem, rounding, digits
        self._evaluator = evaluator if digits is None else partial(evaluator, digits=digits)
        self._device, self._precision = jax.devices(platform)[0], precision
        self._programs: dict[Any, tuple[Callable[..., Any], ProgramFacts]] = {}
        self.facts: dict[str, ProgramFacts] = {}
        """The facts that were found in the program of the last run in each dtype."""

    def run(
        self,
        problem: Problem,
        dtype: str,
        oracle: Results,
        cast_to: Sequence[str] = (),
        noise: int = 0,
    ) -> Results:
        """The results under the oracle's names, and the gradients for the same random cotangents.

        The problem must be the one that this side was made for, except that weights, inputs and
        seed may differ. Gradients are left out if the oracle has none, or if the shapes of the
        results differ from the oracle's. `cast_to` are the dtypes that the reference casts
        to in float64. `noise` is the seed of random rounding.
        """
        # Run the program, which is compiled again for other settings or shapes.
        names = tuple((group, name) for group in GROUPS[:2] for name in oracle.get(group, {}))
        dtypes = wider_dtypes({*cast_to}) if dtype == "float64" else {}
        with self._context(dtype):
            args = Arguments(problem, dtype, self._digits)
            drawn = cotangents(problem.seed, oracle) if "input gradient" in oracle else None
            drawn = jax.tree.map(lambda c: jnp.asarray(in_dtype(c, dtype)), drawn)
            # A new program gets a `ProgramFacts` of its own.
            key = dtype, names, (*dtypes,), drawn is None, args.key
            if key not in self._programs:
                facts = ProgramFacts()
                forward = partial(self._forward, names, args.join, facts)
                program = partial(self._forward_and_backward, forward, dtypes, facts)
                # The optimizer changes how a program rounds, which float64 need not show. The other
                # dtypes are compiled as they are for users.
                is_quick = dtype == "float64" and args.size <= MOST_QUICK
                options = QUICK if is_quick and self._device.platform == "cpu" else None
                self._programs[key] = jax.jit(program, compiler_options=options), facts
            program, self.facts[dtype] = self._programs[key]
            groups, gradient = jax.device_get(
                program(noise, args.differentiated, args.others, drawn)
            )
        results = Results({group: dict(named) for group, named in groups.items()})
        if gradient is None:
            return results

        # Give the gradients the oracle's names.
        places = sorted(i for i in gradient if i >= args.model_size)
        named_places = zip(oracle["input gradient"], places, strict=True)
        results["input gradient"] = {name: gradient[i] for name, i in named_places}
        if problem.to_torch is not None:
            weights, rest, _ = args.join(gradient, args.others)
            by_key = problem.to_torch(weights, rest)
            # A weight that no parameter holds has no influence on the results: its gradient is 0.
            results["weight gradients"] = {
                name: by_key.get(name, np.zeros_like(like))
                for name, like in oracle["weight gradients"].items()
            }
            self.facts[dtype].has_padding_gradient = clear_padding_gradients(
                results, oracle.padding
            )
        return results

    def shapes(self, problem: Problem) -> tuple[Results, ProgramFacts]:
        """Zeros in the shapes of the float64 result, and the facts found in the program."""
        with self._context("float64"):
            facts = ProgramFacts()
            closed, groups, _ = self._trace_forward(problem, facts)
            collect_facts(closed, facts)
        zeros = {
            group: {n: np.broadcast_to(np.zeros((), s.dtype), s.shape) for n, s in named.items()}
            for group, named in groups.items()
        }
        return Results(zeros), facts

    def argument_free(self, problem: Problem) -> list[np.ndarray]:
        """The arrays of the float64 forward pass that depend on no input and no weight."""
        with self._context("float64"):
            closed, *_ = self._trace_forward(problem, ProgramFacts())
            return ArgumentFreeEvaluator(closed, wider_dtypes(set())).arrays()

    def compute_weights(self, problem: Problem) -> None:
        """Runs the part of the float64 forward pass that depends on weights but on no input."""
        with self._context("float64"):
            closed, _, args = self._trace_forward(problem, ProgramFacts())
            given = [
                leaf if i < args.model_size else None
                for leaves in (args.differentiated, args.others)
                for i, leaf in leaves.items()
            ]
            PartialEvaluator(closed, {}, ProgramFacts()).evaluate(given)

    def constants_of(self, problem: Problem) -> list[np.ndarray]:
        """The constants that are rounded to float32: the module's first, then those of its code."""
        with jax.enable_x64(True):
            _, rest = problem.build(problem.state_dict, "float64")
        leaves = jax.tree.leaves(rest)
        real = [np.asarray(leaf) for leaf in leaves if is_floating(leaf)]
        held = [array for array in real if is_rounded(array).any()]
        return [*held, *self.facts["float64"].constants]

    def _trace_forward(self, problem: Problem, facts: ProgramFacts) -> tuple[Any, Any, Arguments]:
        """The program of the forward pass, the shapes of its results, and its arguments."""
        args = Arguments(problem, "float64")
        forward = partial(self._forward, (), args.join, facts)
        closed, (_, groups) = trace_program(forward, (args.differentiated, args.others), facts)
        return closed, groups, args

    @contextlib.contextmanager
    def _context(self, dtype: str) -> Iterator[None]:
        with (
            jax.enable_x64(dtype == "float64"),
            jax.default_device(self._device),
            jax.default_matmul_precision(self._precision),
        ):
            yield

    def _forward_and_backward(
        self, forward: Any, dtypes: dict[str, str], facts: ProgramFacts, noise: Any, *args: Any
    ) -> tuple[Any, Leaves | None]:
        """The results by group and name, and the gradients; facts are added to `facts`."""
        evaluator = self._evaluator
        if self._rounding is not None:
            evaluator = partial(RoundingEvaluator, self._rounding, noise)

        def function(differentiated: Leaves, others: Leaves, cotangents: list[jax.Array] | None):
            if cotangents is None:
                return forward(differentiated, others)[1], None
            forward_of = partial(forward, others=others)
            outputs, pullback, groups = jax.vjp(forward_of, differentiated, has_aux=True)
            if [y.shape for y in outputs] != [c.shape for c in cotangents]:
                return groups, None
            # torch's gradients are the complex conjugates of JAX's
            pairs = zip(cotangents, outputs, strict=True)
            conjugates = [jnp.conj(jnp.asarray(c, y.dtype)) for c, y in pairs]
            return groups, jax.tree.map(jnp.conj, pullback(conjugates)[0])

        return with_dtypes(function, dtypes, facts, evaluator)(*args)

    def _forward(
        self,
        names: Sequence[tuple[str, str]],
        join: Callable[..., Any],
        facts: ProgramFacts,
        differentiated: Leaves,
        others: Leaves,
    ) -> tuple[list[jax.Array], Any]:
        """The floating leaves of the results, and all leaves by group and name.

        `names` are the group and name of each result of the oracle.
        """
        weights, rest, inputs = join(differentiated, others)
        result = self._problem.call(self._problem.load(weights, rest), *inputs)
        groups = with_names_of(leaves_by_group(result, "JAX", as_array), names)
        facts.dtypes = {
            (group, name): leaf.dtype
            for group, named in groups.items()
            for name, leaf in named.items()
        }
        leaves = [leaf for named in groups.values() for leaf in only_floating(named).values()]
        return leaves, OrderedDict((group, OrderedDict(named)) for group, named in groups.items())


def as_array(leaf: Any) -> Any:
    """The leaf as an array; None if it is not one."""
    is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic)
    return jnp.asarray(leaf) if is_array or type(leaf) in (bool, int, float) else None
