"""Run the JAX side of a problem, forward and backward."""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from parity_tests.engine.bounds.rounded_constants import is_rounded
from parity_tests.engine.candidates.adapters import is_inexact
from parity_tests.engine.candidates.evaluator import (
    ArgumentFreeEvaluator,
    Evaluator,
    PartialEvaluator,
    trace_program,
    with_dtypes,
)
from parity_tests.engine.candidates.jax_program import (
    ProgramFacts,
    collect_facts,
    is_real,
    wider_dtypes,
)
from parity_tests.engine.candidates.jax_rounding import RoundingEvaluator
from parity_tests.engine.problem import Problem, arrays, in_dtype, is_flag
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


class Settings(NamedTuple):
    """The settings for which a program is compiled, in addition to the shapes of its arguments."""

    dtype: str
    names: tuple[tuple[str, str], ...] = ()
    """The group and name of each of the oracle's results."""
    wider_dtypes: tuple[tuple[str, str], ...] = ()
    """The dtypes that are replaced, and their replacements."""
    backward: bool = False


class Arguments:
    """The leaves of a problem's weights, of the rest of its model, and of its inputs."""

    def __init__(self, problem: Problem, dtype: str):
        tree = *problem.build(problem.state_dict, dtype), arrays(problem.inputs, dtype)
        leaves, self._structure = jax.tree.flatten(tree)
        weights, self.model_size = (len(jax.tree.leaves(tree[:count])) for count in (1, 2))
        if problem.to_torch is None:  # the gradients of weights would have no names
            weights = 0
        self.differentiated: Leaves = {}
        self.others: Leaves = {}
        self._constants: Leaves = {}
        for i, leaf in enumerate(leaves):
            if not hasattr(leaf, "dtype"):
                self._constants[i] = leaf
            elif is_inexact(leaf) and not weights <= i < self.model_size:
                self.differentiated[i] = leaf
            else:
                self.others[i] = leaf
        flags = [(i, type(x), x if is_flag(x) else id(x)) for i, x in self._constants.items()]
        shapes = [(i, x.shape, x.dtype) for i, x in (self.differentiated | self.others).items()]
        self.key = self._structure, len(self.differentiated), (*flags,), (*shapes,)
        """Equal for arguments for which the same program can run."""

    @property
    def join(self) -> Callable[[Leaves, Leaves], tuple[Any, Any, Any]]:
        """A function that makes weights, rest and inputs from `differentiated` and `others`."""
        return partial(_join, self._structure, self._constants)


def _join(structure: Any, constants: Leaves, differentiated: Leaves, others: Leaves) -> Any:
    leaves = {**constants, **others, **differentiated}
    return jax.tree.unflatten(structure, [leaves[i] for i in range(len(leaves))])


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

    """

    def __init__(
        self,
        problem: Problem,
        platform: str = "cpu",
        *,
        precision: str = "highest",
        evaluator: Callable[..., Evaluator] = Evaluator,
        rounding: str | None = None,
    ):
        self._problem, self._evaluator, self._rounding = problem, evaluator, rounding
        self._device, self._precision = jax.devices(platform)[0], precision
        self._programs: dict[Any, tuple[Callable[..., Any], ProgramFacts]] = {}
        self.facts: dict[str, ProgramFacts] = {}
        """The facts that were found in the program of the last run in each dtype."""

    def run(
        self,
        problem: Problem,
        dtype: str,
        oracle: Results,
        casts_of_torch: Sequence[str] = (),
        noise: int = 0,
    ) -> Results:
        """The results under the oracle's names, and the gradients for the same random cotangents.

        The problem must be the one that this side was made for, except that weights, inputs and
        seed may differ. Gradients are left out if the oracle has none, or if the shapes of the
        results differ from the oracle's. `casts_of_torch` are the dtypes that the torch side casts
        to in float64. `noise` is the seed of random rounding.
        """
        # Run the program, which is compiled again for other settings or shapes.
        settings = Settings(
            dtype,
            tuple((group, name) for group in GROUPS[:2] for name in oracle.get(group, {})),
            tuple(wider_dtypes({*casts_of_torch}).items()) if dtype == "float64" else (),
            "input gradient" in oracle,
        )
        with self._context(dtype):
            args = Arguments(problem, dtype)
            drawn = [jnp.asarray(in_dtype(c, dtype)) for c in cotangents(problem.seed, oracle)]
            # A new program gets a `ProgramFacts` of its own.
            if (key := (settings, args.key)) not in self._programs:
                facts = ProgramFacts()
                program = partial(self._forward_and_backward, settings, args.join, facts)
                self._programs[key] = jax.jit(program), facts
            program, self.facts[dtype] = self._programs[key]
            groups, gradient = jax.device_get(
                program(noise, args.differentiated, args.others, drawn)
            )
        results = Results({group: dict(named) for group, named in groups.items()})
        if gradient is None:
            return results

        # Give the gradients the oracle's names.
        of_inputs = [gradient[i] for i in sorted(gradient) if i >= args.model_size]
        results["input gradient"] = dict(zip(oracle["input gradient"], of_inputs, strict=True))
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
        """Run the part of the float64 forward pass that depends on weights but on no input."""
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
        real = [np.asarray(leaf) for leaf in leaves if is_real(getattr(leaf, "dtype", None))]
        held = [array for array in real if is_rounded(array).any()]
        return [*held, *self.facts["float64"].constants]

    def _trace_forward(self, problem: Problem, facts: ProgramFacts) -> tuple[Any, Any, Arguments]:
        """The program of the forward pass, the shapes of its results, and its arguments."""
        args = Arguments(problem, "float64")
        forward = partial(self._forward, Settings("float64"), args.join, facts)
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
        self,
        settings: Settings,
        join: Callable[..., Any],
        facts: ProgramFacts,
        noise: Any,
        *args: Any,
    ) -> tuple[Any, Leaves | None]:
        """The results by group and name, and the gradients; facts are added to `facts`."""
        evaluator = self._evaluator
        if self._rounding is not None:
            evaluator = partial(RoundingEvaluator, self._rounding, noise)

        def function(differentiated: Leaves, others: Leaves, cotangents: list[jax.Array]):
            def forward(differentiated: Leaves):
                return self._forward(settings, join, facts, differentiated, others)

            if not settings.backward:
                return forward(differentiated)[1], None
            outputs, pullback, groups = jax.vjp(forward, differentiated, has_aux=True)
            if [y.shape for y in outputs] != [c.shape for c in cotangents]:
                return groups, None
            # torch's gradients are the complex conjugates of JAX's
            pairs = zip(cotangents, outputs, strict=True)
            conjugates = [jnp.conj(jnp.asarray(c, y.dtype)) for c, y in pairs]
            return groups, jax.tree.map(jnp.conj, pullback(conjugates)[0])

        return with_dtypes(function, dict(settings.wider_dtypes), facts, evaluator)(*args)

    def _forward(
        self,
        settings: Settings,
        join: Callable[..., Any],
        facts: ProgramFacts,
        differentiated: Leaves,
        others: Leaves,
    ) -> tuple[list[jax.Array], Any]:
        """The floating leaves of the results, and all leaves by group and name."""
        weights, rest, inputs = join(differentiated, others)
        result = self._problem.call(self._problem.load(weights, rest), *inputs)
        groups = with_names_of(leaves_by_group(result, "JAX", as_array), settings.names)
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
