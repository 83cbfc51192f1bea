"""Run a torch module and its JAX port, forward and backward."""

import contextlib
import dataclasses
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from jax_models.weights.constant import Constant
from jax_models.weights.transfer import as_numpy
from parity_tests.engine.casts import Found, lifted_dtypes, rewritten
from parity_tests.engine.problem import (
    Arrays,
    Problem,
    arrays,
    in_double,
    in_dtype,
    in_every_dtype,
    is_flag,
    tensors,
    twin_in,
)
from parity_tests.engine.rounding import InFloat64, RandomRounding
from parity_tests.engine.tolerance import relative_errors

GROUPS = ("outputs", "final state", "input gradient", "weight gradients")


class Results(dict[str, Arrays]):
    """Arrays by group and name."""

    without_gradient: frozenset[tuple[str, str]] = frozenset()
    """Group and name of what torch does not differentiate."""


def run_oracle(problem: Problem) -> tuple[Results, InFloat64]:
    """What `run_torch` returns, in float64 throughout, and what was found on the way.

    Raises:
        TypeError: the module mixes float64 with tensors that stay in float32.

    """
    try:
        with InFloat64() as mode:
            results = run_torch(problem, "float64")
    except RuntimeError as error:
        if "dtype" not in str(error):
            raise
        raise TypeError(
            f"torch: {error}: float64 meets tensors of the module that stay in less; make them "
            "buffers, or of the inputs' dtype"
        ) from error
    return results, mode


def run_torch(problem: Problem, dtype: str) -> Results:
    """The torch side's result, and the gradients that random cotangents give."""
    return _run_twin(problem, twin_in(problem.twin, dtype), tensors(problem.inputs, dtype))


def run_torch_rounded(
    problem: Problem, dtype: str, seed: int, decisions: Sequence[torch.Tensor]
) -> Results:
    """As `run_torch`, in float64 with each operation's result rounded to the dtype at random."""
    twin = twin_in(twin_in(problem.twin, dtype), "float64")
    with RandomRounding(dtype, seed, decisions):
        return _run_twin(problem, twin, in_double(tensors(problem.inputs, dtype)))


def result_dtypes(problem: Problem, dtype: str) -> dict[tuple[str, str], np.dtype]:
    """The dtypes of the torch side's result, with the casts of its own, by group and name.

    Where float64 meets what it casts to less, torch has no such result, and there are none.
    """
    twin, inputs = twin_in(problem.twin, dtype), tensors(problem.inputs, dtype)
    try:
        with torch.no_grad(), same_draws(problem), eager():
            groups = grouped(problem.call_twin(twin, *inputs), "torch")
    except RuntimeError:
        return {}
    return {
        (group, name): as_numpy(leaf[..., :0] if leaf.ndim else leaf).dtype
        for group, named in groups.items()
        for name, leaf in named.items()
    }


def changes_result(problem: Problem, keys: Sequence[str]) -> bool:
    """Does the torch side return something else if these weights are 1 more?"""
    twin = twin_in(problem.twin, "float64")
    weights = twin.state_dict()
    with torch.no_grad():
        for key in keys:
            weights[key] += 1
    before, after = forward(problem), forward(dataclasses.replace(problem, twin=twin))
    return not all(
        np.array_equal(array, after[group][name], equal_nan=True)
        for group, named in before.items()
        for name, array in named.items()
    )


def forward(problem: Problem) -> Results:
    """The torch side's result in float64."""
    twin, inputs = twin_in(problem.twin, "float64"), tensors(problem.inputs, "float64")
    with torch.no_grad(), same_draws(problem), eager(), InFloat64():
        groups = grouped(problem.call_twin(twin, *inputs), "torch")
    return Results(
        {group: {name: _numpy(t) for name, t in named.items()} for group, named in groups.items()}
    )


def eager() -> contextlib.AbstractContextManager[Any]:
    """What torch.compile was called on runs as it is written."""
    return torch.compiler.set_stance("force_eager")


@contextlib.contextmanager
def same_draws(problem: Problem) -> Iterator[None]:
    """What draws random numbers draws the same in each run, and nothing outside is touched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(problem.seed)
        yield


def _run_twin(problem: Problem, twin: torch.nn.Module, inputs: Any) -> Results:
    for leaf in tensors_in(inputs):
        leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())
    # the module may write into what it is given
    given = jax.tree.map(lambda leaf: leaf if is_flag(leaf) else leaf.clone(), inputs)
    with same_draws(problem), eager():
        groups = grouped(problem.call_twin(twin, *given), "torch")
    results = Results(
        {group: {name: _numpy(t) for name, t in named.items()} for group, named in groups.items()}
    )
    results.without_gradient = frozenset(
        (group, name)
        for group, named in groups.items()
        for name, t in named.items()
        if not t.requires_grad
    )
    pairs = [
        (t, torch.tensor(cotangent, dtype=t.dtype))
        for t, cotangent in zip(
            (
                t
                for named in groups.values()
                for t in named.values()
                if t.is_floating_point() or t.is_complex()
            ),
            _cotangents(problem, results),
            strict=True,
        )
        if t.requires_grad
    ]
    if not pairs:
        return results
    torch.autograd.backward([t for t, _ in pairs], [cotangent for _, cotangent in pairs])
    results["input gradient"] = {
        name: _gradient(t)
        for i, tree in enumerate(inputs)
        for name, t in _named(tree, f"input {i}").items()
        if isinstance(t, torch.Tensor) and t.requires_grad
    }
    results["weight gradients"] = {
        name: _gradient(weight)
        for name, weight in twin.named_parameters(remove_duplicate=False)
        if weight.requires_grad
    }
    without_padding(problem, results)
    return results


def padding_rows(twin: torch.nn.Module) -> dict[str, set[int]]:
    """The rows of embeddings whose gradient torch drops (`padding_idx`), by the weights' names."""
    rows: dict[int, set[int]] = {}
    for module in twin.modules():
        padding = getattr(module, "padding_idx", None)
        weight = getattr(module, "weight", None)
        if isinstance(padding, int) and isinstance(weight, torch.Tensor):
            rows.setdefault(id(weight), set()).add(padding)
    return {
        name: rows[id(weight)]
        for name, weight in twin.named_parameters(remove_duplicate=False)
        if id(weight) in rows
    }


def without_padding(problem: Problem, results: Results) -> bool:
    """Make the gradients of padding rows zero; is there one that was not?"""
    found = False
    for name, rows in padding_rows(problem.twin).items():
        gradient = results["weight gradients"].get(name)
        for row in rows if gradient is not None else ():
            gradient = np.array(gradient)
            found |= bool(np.any(gradient[row]))
            gradient[row] = 0
            results["weight gradients"][name] = gradient
    return found


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors among the leaves."""
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, torch.Tensor)]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Fixed:
    """A leaf that is no array: what a compiled function knows beforehand."""

    value: Any

    def __eq__(self, other: object) -> bool:
        """Is it the same, 1 and True apart?"""
        if not isinstance(other, Fixed) or type(self.value) is not type(other.value):
            return False
        return self.value is other.value or (is_flag(self.value) and self.value == other.value)

    def __hash__(self) -> int:
        """By value if it is a flag, else by identity."""
        return hash((type(self.value), self.value if is_flag(self.value) else id(self.value)))


def fixed(tree: Any) -> Any:
    """The tree with what is no array made part of its structure."""
    return jax.tree.map(lambda leaf: leaf if hasattr(leaf, "dtype") else Fixed(leaf), tree)


def unfixed(tree: Any) -> Any:
    """The tree of before."""

    def is_fixed(node: Any) -> bool:
        return isinstance(node, Fixed)

    return jax.tree.map(lambda n: n.value if is_fixed(n) else n, tree, is_leaf=is_fixed)


@dataclasses.dataclass(frozen=True)
class Traced:
    """What a compiled function is made for, beside shapes."""

    dtype: str
    names: tuple[tuple[str, str], ...]
    """Of the oracle's results: group and name."""
    lifted: tuple[tuple[str, str], ...]
    """The dtypes that are replaced, and by what."""
    backward: bool


class JaxSide:
    """A problem's JAX side, compiled once a dtype for all weights and inputs of the same shapes.

    `transform` rewrites the function of the whole forward and backward pass before it is compiled.
    float64 runs with JAX's x64, and without the casts to float32 inside; all else runs without x64,
    where nothing is promoted to more than a user has.
    """

    def __init__(
        self,
        problem: Problem,
        platform: str = "cpu",
        *,
        precision: str = "highest",
        transform: Callable[[Callable], Callable] = lambda function: function,
    ):
        self._call, self._transform = problem.call, transform
        self._to_torch = problem.gradient_to_torch or problem.to_torch
        self._device, self._precision = jax.devices(platform)[0], precision
        self._compiled = jax.jit(self._forward_and_backward, static_argnums=0)
        self.found: dict[str, Found] = {}
        """What was seen when a dtype was compiled."""

    def run(
        self,
        problem: Problem,
        dtype: str,
        oracle: Results,
        casts_of_torch: Sequence[str] = (),
        moves: Sequence[np.ndarray] = (),
    ) -> Results:
        """What `run_torch` returns, under the oracle's names.

        The problem is the one that was compiled, with any weights, inputs and seed. There are no
        gradients where the result's shapes are others than the oracle's, or where it has none.
        `casts_of_torch`: the dtypes that the torch side casts to in float64. `moves`: by how much
        of its size each of `constants_of(problem)` is to be another.
        """
        is_double = dtype == "float64"
        with (
            jax.enable_x64(is_double),
            jax.default_device(self._device),
            jax.default_matmul_precision(self._precision),
        ):
            weights, rest = _split(problem.build(problem.twin, dtype))
            rest, moves = _moved(rest, moves)
            floating, others = _partition(fixed(arrays(problem.inputs, dtype)))
            differentiated = (None if self._to_torch is None else weights, floating)
            given = (weights if self._to_torch is None else None, rest, others)
            cotangents = [jnp.asarray(in_dtype(c, dtype)) for c in _cotangents(problem, oracle)]
            traced = Traced(
                dtype,
                tuple((group, name) for group in GROUPS[:2] for name in oracle.get(group, {})),
                tuple(lifted_dtypes(set(casts_of_torch)).items()) if is_double else (),
                "input gradient" in oracle,
            )
            groups, gradients = jax.device_get(
                self._compiled(traced, [*moves], differentiated, given, cotangents)
            )
        results = Results({group: dict(named) for group, named in groups.items()})
        if gradients is None:
            return results
        weight_gradients, input_gradients = gradients
        results["input gradient"] = dict(
            zip(oracle["input gradient"], jax.tree.leaves(input_gradients), strict=True)
        )
        if self._to_torch is not None:
            by_key = self._to_torch(_merge(weight_gradients, rest))
            names = oracle["weight gradients"]
            results["weight gradients"] = {name: by_key[name] for name in names}
            self.found[dtype].padding |= without_padding(problem, results)
        return results

    def constants_of(self, problem: Problem) -> list[np.ndarray]:
        """The constants of the float64 run: those that a module holds, then those of its code."""
        with jax.enable_x64(True):
            held = _held(_split(problem.build(problem.twin, "float64"))[1])
        return [*map(np.asarray, held), *self.found["float64"].constants]

    def _forward_and_backward(self, traced: Traced, moves: list[Any], *args):
        found = self.found[traced.dtype] = Found()

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

        return rewritten(self._transform(function), dict(traced.lifted), found, moves)(*args)

    def _forward(self, differentiated, given, traced: Traced, found: Found):
        """The floating leaves of the result, and all of it by group and name."""
        (weights, floating), (constants, rest, others) = differentiated, given
        model = _merge(constants if weights is None else weights, rest)
        inputs = jax.tree.map(
            lambda x, n: n if x is None else x, floating, others, is_leaf=lambda x: x is None
        )
        groups = aligned(grouped(self._call(model, *unfixed(inputs)), "JAX"), traced.names)
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
    """The weights, and what an NNX module has beside them."""
    if not isinstance(built, nnx.Module):
        return fixed(built), None
    graphdef, weights, rest = nnx.split(built, nnx.Param, ...)
    return weights, (graphdef, rest)


def _is_constant(leaf: Any) -> bool:
    """Is it an array that an NNX module holds, and no weight or statistic?"""
    known = nnx.Param | nnx.BatchStat | Constant
    value = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
    return not isinstance(leaf, known) and is_real(value)


def _held(rest: Any) -> list[Any]:
    """The constants that an NNX module holds."""
    if rest is None:
        return []
    leaves = jax.tree.leaves(rest[1], is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return [
        leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        for leaf in leaves
        if _is_constant(leaf)
    ]


def _moved(rest: Any, moves: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """With the constants that a module holds moved, and the moves that are left."""
    if not moves or rest is None:
        return rest, moves
    left = iter(moves)

    def move(leaf: Any) -> Any:
        if not _is_constant(leaf):
            return leaf
        factor = 1 + next(left)
        return (
            leaf.replace(leaf.get_value() * factor)
            if isinstance(leaf, nnx.Variable)
            else (leaf * factor)
        )

    is_leaf = lambda leaf: isinstance(leaf, nnx.Variable)  # noqa: E731
    return (rest[0], jax.tree.map(move, rest[1], is_leaf=is_leaf)), [*left]


def _merge(weights: Any, rest: Any) -> Any:
    return unfixed(weights) if rest is None else nnx.merge(rest[0], weights, rest[1], copy=True)


def _partition(tree: Any) -> tuple[Any, Any]:
    """The floating leaves and the others, None in the places of the rest."""
    is_floating = jax.tree.map(lambda x: jnp.issubdtype(x.dtype, jnp.inexact), tree)
    return (
        jax.tree.map(lambda x, keep: x if keep else None, tree, is_floating),
        jax.tree.map(lambda x, drop: None if drop else x, tree, is_floating),
    )


def aligned(
    groups: dict[str, dict[str, Any]], names: Sequence[tuple[str, str]]
) -> dict[str, dict[str, Any]]:
    """The leaves under the names that the other side has for them, if they are as many.

    By name where both sides have the same names, otherwise in order.
    """
    ours = {route(name): leaf for named in groups.values() for name, leaf in named.items()}
    leaves = [leaf for named in groups.values() for leaf in named.values()]
    if len(leaves) != len(names):
        return groups
    routes = [route(name) for _, name in names]
    are_named = any(not word.isdigit() for path in routes for word in path)
    if are_named and len(ours) == len(names) and {*routes} == {*ours}:
        leaves = [ours[path] for path in routes]
    result: dict[str, dict[str, Any]] = {}
    for (group, name), leaf in zip(names, leaves, strict=True):
        result.setdefault(group, {})[name] = leaf
    return result


def route(name: str) -> tuple[str, ...]:
    """The keys, fields and places that lead to a leaf, however they are written."""
    return tuple("".join(word) for word in re.findall(r"\.(\w+)|\['([^']*)'\]|\[(\d+)\]", name))


def grouped(result: Any, side: str) -> dict[str, dict[str, Any]]:
    """A result's arrays by group and name."""
    first, *rest = result if type(result) is tuple else (result,)
    groups = {
        "outputs": leaves_of(first, "y"),
        "final state": leaves_of(rest[0] if len(rest) == 1 else tuple(rest), "state"),
    }
    arrays_by_group: dict[str, dict[str, Any]] = {}
    others = []
    for group, named in groups.items():
        for name, leaf in named.items():
            array = as_array(leaf, side)
            if array is None:
                others.append(f"{type(leaf).__name__} as {name}")
            else:
                arrays_by_group.setdefault(group, {})[name] = array
    if others and not arrays_by_group:
        raise TypeError(
            f"{side}: expected a tree of arrays, got {others[0]}: say what to compare by `call` "
            "and `call_twin`"
        )
    return arrays_by_group


def as_array(leaf: Any, side: str) -> Any:
    """The leaf as an array of the side, None if it is none."""
    if side == "torch":
        if isinstance(leaf, torch.Tensor):
            return leaf if leaf.layout == torch.strided else leaf.to_dense()
        is_number = isinstance(leaf, np.ndarray | np.generic) or type(leaf) in (bool, int, float)
        return torch.as_tensor(leaf) if is_number else None
    is_array = isinstance(leaf, jax.Array | np.ndarray | np.generic)
    return jnp.asarray(leaf) if is_array or type(leaf) in (bool, int, float) else None


def leaves_of(tree: Any, name: str) -> dict[str, Any]:
    """The leaves by name, in the order in which their dicts and classes have them."""
    if tree is None:
        return {}
    if isinstance(tree, Mapping):
        children = {f"['{key}']": value for key, value in tree.items()}
    elif isinstance(tree, tuple) and (fields := getattr(tree, "_fields", None)) is not None:
        children = {f".{key}": value for key, value in zip(fields, tree, strict=True)}
    elif isinstance(tree, list | tuple):
        children = {f"[{i}]": value for i, value in enumerate(tree)}
    elif dataclasses.is_dataclass(tree) and not hasattr(tree, "dtype"):
        children = {f".{f.name}": getattr(tree, f.name) for f in dataclasses.fields(tree)}
    else:
        return _named(tree, name)
    return {
        key: leaf
        for child, value in children.items()
        for key, leaf in leaves_of(value, name + child).items()
    }


def _named(tree: Any, name: str) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {name + jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def is_real(leaf: Any) -> bool:
    """Is it an array of real numbers?"""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def only_floating(named: Mapping[str, Any]) -> dict[str, Any]:
    """Those of real or complex numbers."""
    return {name: a for name, a in named.items() if jnp.issubdtype(a.dtype, jnp.inexact)}


def largest_by_group(runs: Iterable[tuple[Results, Results]]) -> dict[str, dict[str, float]]:
    """The largest relative error of each tensor, by group, in pairs of a run and its oracle."""
    largest: dict[str, dict[str, float]] = {}
    for run, oracle in runs:
        for group in filter(oracle.__contains__, run):
            tensors = (only_floating(results[group]) for results in (run, oracle))
            errors = relative_errors(*tensors, negligible="gradient" in group)
            known = largest.setdefault(group, errors)
            largest[group] = {name: max(error, known[name]) for name, error in errors.items()}
    return largest


def _cotangents(problem: Problem, results: Results) -> list[np.ndarray]:
    """Random gradients with respect to each floating array of the result."""
    rng = np.random.default_rng(problem.seed)

    constant = getattr(results, "without_gradient", frozenset())

    def draw(place: tuple[str, str], array: np.ndarray) -> np.ndarray:
        real = (place not in constant) * in_every_dtype(rng.standard_normal(array.shape))
        if not np.iscomplexobj(array):
            return real
        imaginary = in_every_dtype(rng.standard_normal(array.shape))
        return real + 1j * (place not in constant) * imaginary

    return [
        draw((group, name), array)
        for group in GROUPS[:2]
        for name, array in only_floating(results.get(group, {})).items()
    ]


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return as_numpy(tensor.detach().cpu().resolve_conj().resolve_neg().clone())


def _gradient(tensor: torch.Tensor) -> np.ndarray:
    """Zero where nothing depends on the tensor, as in JAX."""
    if tensor.grad is None:
        return np.zeros(tensor.shape)
    return _numpy(tensor.grad.to_dense() if tensor.grad.is_sparse else tensor.grad)
