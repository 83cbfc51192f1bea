"""Run a torch module and its JAX port, forward and backward."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from parity_tests.engine.problem import Arrays, Problem, arrays, in_double, in_every_dtype, tensors
from parity_tests.engine.rounding import InFloat64, RandomRounding

GROUPS = ("outputs", "final state", "input gradient", "weight gradients")

Results = dict[str, Arrays]
"""Arrays by group and name."""


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
    return _run_twin(
        problem,
        copy.deepcopy(problem.twin).to(getattr(torch, dtype)),
        tensors(problem.inputs, dtype),
    )


def run_torch_rounded(
    problem: Problem, dtype: str, seed: int, decisions: Sequence[torch.Tensor]
) -> Results:
    """As `run_torch`, in float64 with each operation's result rounded to the dtype at random."""
    twin = copy.deepcopy(problem.twin).to(getattr(torch, dtype)).double()
    with RandomRounding(dtype, seed, decisions):
        return _run_twin(problem, twin, in_double(tensors(problem.inputs, dtype)))


def _run_twin(problem: Problem, twin: torch.nn.Module, inputs: Any) -> Results:
    for leaf in jax.tree.leaves(inputs):
        leaf.requires_grad_(leaf.is_floating_point())
    groups = _grouped(problem.call_twin(twin, *inputs), torch.Tensor, "torch")
    results = {
        group: {name: _numpy(t) for name, t in named.items()} for group, named in groups.items()
    }
    pairs = [
        (t, torch.tensor(cotangent, dtype=t.dtype))
        for t, cotangent in zip(
            (t for named in groups.values() for t in named.values() if t.is_floating_point()),
            _cotangents(problem, results),
            strict=True,
        )
        if t.requires_grad
    ]
    torch.autograd.backward([t for t, _ in pairs], [cotangent for _, cotangent in pairs])
    results["input gradient"] = {
        name: _gradient(t)
        for i, tree in enumerate(inputs)
        for name, t in _named(tree, f"input {i}").items()
        if t.requires_grad
    }
    results["weight gradients"] = {
        name: _gradient(weight)
        for name, weight in twin.named_parameters(remove_duplicate=False)
        if weight.requires_grad
    }
    return results


class JaxSide:
    """A problem's JAX side, compiled once a dtype for all weights and inputs of the same shapes.

    `transform` rewrites the function of the whole forward and backward pass before it is compiled.
    """

    def __init__(
        self,
        problem: Problem,
        platform: str = "cpu",
        *,
        precision: str = "highest",
        transform: Callable[[Callable], Callable] = lambda function: function,
    ):
        self._call, self._to_torch = problem.call, problem.to_torch
        self._device, self._precision = jax.devices(platform)[0], precision
        self._compiled = jax.jit(transform(self._forward_and_backward))

    def run(self, problem: Problem, dtype: str, oracle: Results) -> Results:
        """What `run_torch` returns, under the oracle's names.

        The problem is the one that was compiled, with any weights, inputs and seed. There are no
        gradients where the result's shapes are others than the oracle's.
        """
        with jax.default_device(self._device), jax.default_matmul_precision(self._precision):
            weights, rest = _split(problem.build(problem.twin, dtype))
            floating, integers = _partition(arrays(problem.inputs, dtype))
            differentiated = (None if self._to_torch is None else weights, floating)
            given = (weights if self._to_torch is None else None, rest, integers)
            groups, gradients = jax.device_get(
                self._compiled(differentiated, given, _cotangents(problem, oracle))
            )
        results: Results = {
            group: _renamed(named, oracle.get(group, {})) for group, named in groups.items()
        }
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
        return results

    def _forward_and_backward(self, differentiated, given, cotangents):
        outputs, pullback, groups = jax.vjp(
            lambda differentiated: self._forward(differentiated, given),
            differentiated,
            has_aux=True,
        )
        if [y.shape for y in outputs] != [c.shape for c in cotangents]:
            return groups, None
        cast = [jnp.asarray(c, y.dtype) for c, y in zip(cotangents, outputs, strict=True)]
        return groups, pullback(cast)[0]

    def _forward(self, differentiated, given):
        """The floating leaves of the result, and all of it by group and name."""
        (weights, floating), (constants, rest, integers) = differentiated, given
        model = _merge(constants if weights is None else weights, rest)
        inputs = jax.tree.map(
            lambda x, n: n if x is None else x, floating, integers, is_leaf=lambda x: x is None
        )
        groups = _grouped(self._call(model, *inputs), jax.Array, "JAX")
        ordered = OrderedDict((group, OrderedDict(named)) for group, named in groups.items())
        return [
            leaf for named in groups.values() for leaf in only_floating(named).values()
        ], ordered


def _split(built: Any) -> tuple[Any, Any]:
    """The weights, and what an NNX module has beside them."""
    if not isinstance(built, nnx.Module):
        return built, None
    graphdef, weights, rest = nnx.split(built, nnx.Param, ...)
    return weights, (graphdef, rest)


def _merge(weights: Any, rest: Any) -> Any:
    return weights if rest is None else nnx.merge(rest[0], weights, rest[1])


def _partition(tree: Any) -> tuple[Any, Any]:
    """The floating leaves and the others, None in the places of the rest."""
    is_floating = jax.tree.map(lambda x: jnp.issubdtype(x.dtype, jnp.floating), tree)
    return (
        jax.tree.map(lambda x, keep: x if keep else None, tree, is_floating),
        jax.tree.map(lambda x, drop: None if drop else x, tree, is_floating),
    )


def _renamed(named: Arrays, like: Arrays) -> Arrays:
    """Under the oracle's names, if there are as many."""
    return dict(zip(like if len(like) == len(named) else named, named.values(), strict=True))


def _grouped(result: Any, kind: type, side: str) -> dict[str, dict[str, Any]]:
    """A result's leaves by group and name."""
    first, *rest = result if type(result) is tuple else (result,)
    groups = {
        "outputs": _named(first, "y"),
        "final state": _named(rest[0] if len(rest) == 1 else tuple(rest), "state"),
    }
    for named in groups.values():
        for name, leaf in named.items():
            if not isinstance(leaf, kind):
                raise TypeError(
                    f"{side}: expected a tree of arrays, got {type(leaf).__name__} as "
                    f"{name}: say what to compare by `call` and `call_twin`"
                )
            if "complex" in str(leaf.dtype):
                raise TypeError(
                    f"{side}: {name} is complex: compare its real and imaginary parts, by `call` "
                    "and `call_twin`"
                )
    return {group: named for group, named in groups.items() if named}


def _named(tree: Any, name: str) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {name + jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def only_floating(named: Arrays) -> Arrays:
    return {name: a for name, a in named.items() if jnp.issubdtype(a.dtype, jnp.floating)}


def _cotangents(problem: Problem, results: Results) -> list[np.ndarray]:
    """Random gradients with respect to each floating array of the result."""
    rng = np.random.default_rng(problem.seed)
    arrays = [a for group in GROUPS[:2] for a in only_floating(results.get(group, {})).values()]
    return [in_every_dtype(rng.standard_normal(a.shape)) for a in arrays]


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()


def _gradient(tensor: torch.Tensor) -> np.ndarray:
    """Zero where nothing depends on the tensor, as in JAX."""
    return np.zeros(tensor.shape) if tensor.grad is None else _numpy(tensor.grad)
