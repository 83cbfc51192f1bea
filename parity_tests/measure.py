"""Run a torch module and its JAX port forward and backward, and measure both against float64."""

import copy
import dataclasses
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from parity_tests.cases import DTYPES, in_every_dtype
from parity_tests.locate import Location
from parity_tests.problem import Arrays, Problem, arrays, tensors
from parity_tests.tolerance import Error, group_error

GROUPS = ("outputs", "final state", "input gradient", "weight gradients")

Results = dict[str, Arrays]
"""Arrays by group and name."""


@dataclasses.dataclass(frozen=True)
class Report:
    """How far the JAX port and the torch module are from the torch module in float64.

    `errors` are by dtype and group; `faults` are what no error can say, each a failure; `notes` are
    what was not compared.
    """

    errors: dict[str, dict[str, Error]]
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    location: Location | None = None
    """Where a failing pair first departs, if that was asked for."""

    @property
    def failures(self) -> Iterator[tuple[str, str, Error]]:
        """The dtype, group and error of each that is over its bound."""
        for dtype, groups in self.errors.items():
            yield from ((dtype, group, e) for group, e in groups.items() if not e.passed)

    @property
    def passed(self) -> bool:
        """Was something compared, and is all of it equal?"""
        return bool(self.errors) and not self.faults and not any(self.failures)

    def __str__(self) -> str:
        """A table, and what is wrong."""
        lines = [f"{'':9}{'':18}{'torch':>9}{'JAX':>9}{'ratio':>9}{'bound':>9}"]
        for dtype, groups in self.errors.items():
            for group, e in groups.items():
                ratio = "–" if e.ratio is None else f"{e.ratio:.3g}"
                verdict = "pass" if e.passed else f"FAIL, worst in {e.worst}"
                unstable = ", unstable reference" if e.unstable else ""
                lines.append(
                    f"{dtype:9}{group:18}{e.torch:9.1e}{e.jax:9.1e}{ratio:>9}{e.bound:9.1e}  "
                    f"{verdict}{unstable}"
                )
        lines += [f"FAIL: {fault}" for fault in self.faults]
        lines += [f"note: {note}" for note in self.notes]
        if self.location is not None:
            lines.append(f"\n{self.location}")
        return "\n".join(lines)


def measure(problem: Problem, dtypes: Iterable[str] = DTYPES, platform: str = "cpu") -> Report:
    """The errors in those of the dtypes that the problem has."""
    oracle = run_torch(problem, "float64")
    if faults := _not_finite(oracle):
        return Report({}, tuple(faults))
    torch32 = run_torch(problem, "float32")
    known = {"float64": oracle, "float32": torch32}
    errors = {}
    for dtype in (dtype for dtype in dtypes if dtype in problem.dtypes):
        ours = run_jax(problem, dtype, oracle, platform)
        if mismatches := _mismatches(oracle, ours, dtype):
            faults += mismatches
            continue
        theirs = known[dtype] if dtype in known else run_torch(problem, dtype)
        errors[dtype] = {
            group: group_error(
                jnp.dtype(dtype),
                oracle=compared,
                torch=_floating(theirs[group]),
                jax=_floating(ours[group]),
                torch32=_floating(torch32[group]),
            )
            for group in GROUPS
            if (compared := _floating(oracle.get(group, {}))) and group in ours
        }
    return Report(errors, tuple(dict.fromkeys(faults)))


def run_torch(problem: Problem, dtype: str) -> Results:
    """The torch side's result, and the gradients that random cotangents give."""
    twin = copy.deepcopy(problem.twin).to(getattr(torch, dtype))
    inputs = tensors(problem.inputs, dtype)
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


def run_jax(problem: Problem, dtype: str, oracle: Results, platform: str = "cpu") -> Results:
    """The same of the JAX side, under the oracle's names; no gradients if its result is another."""
    with jax.default_device(jax.devices(platform)[0]), jax.default_matmul_precision("highest"):
        built = problem.build(problem.twin, dtype)
        graphdef, weights, rest = (
            nnx.split(built, nnx.Param, ...)
            if isinstance(built, nnx.Module)
            else (None, built, None)
        )
        inputs, structure = jax.tree.flatten(arrays(problem.inputs, dtype))
        is_floating = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in inputs]
        cotangents = _cotangents(problem, oracle)
        names: dict[str, list[str]] = {}  # in order, which jit does not keep in a dictionary

        def forward(differentiated, given):
            """The floating leaves of the result, and all of it by group and name."""
            weights, floating = differentiated
            weights = given if problem.to_torch is None else weights
            model = weights if graphdef is None else nnx.merge(graphdef, weights, rest)
            floating = iter(floating)
            filled = [
                next(floating) if is_float else leaf
                for leaf, is_float in zip(inputs, is_floating, strict=True)
            ]
            result = problem.call(model, *jax.tree.unflatten(structure, filled))
            groups = _grouped(result, jax.Array, "JAX")
            names.update({group: [*named] for group, named in groups.items()})
            lists = {group: [*named.values()] for group, named in groups.items()}
            flat = [leaf for leaves in lists.values() for leaf in leaves]
            return [leaf for leaf in flat if jnp.issubdtype(leaf.dtype, jnp.floating)], lists

        @jax.jit
        def forward_and_backward(differentiated, given):
            outputs, pullback, groups = jax.vjp(
                partial(forward, given=given), differentiated, has_aux=True
            )
            if [y.shape for y in outputs] != [c.shape for c in cotangents]:
                return groups, None
            cast = [jnp.asarray(c, y.dtype) for c, y in zip(cotangents, outputs, strict=True)]
            return groups, pullback(cast)[0]

        floating = [leaf for leaf, is_float in zip(inputs, is_floating, strict=True) if is_float]
        differentiated = (None if problem.to_torch is None else weights, floating)
        given = weights if problem.to_torch is None else None
        groups, gradients = jax.device_get(forward_and_backward(differentiated, given))
    for group in names.keys() & oracle.keys():
        if len(names[group]) == len(oracle[group]):
            names[group] = [*oracle[group]]
    results: Results = {
        group: dict(zip(own, groups[group], strict=True)) for group, own in names.items()
    }
    if gradients is None:
        return results
    weight_gradients, input_gradients = gradients
    results["input gradient"] = dict(zip(oracle["input gradient"], input_gradients, strict=True))
    if problem.to_torch is not None:
        if graphdef is not None:
            weight_gradients = nnx.merge(graphdef, weight_gradients, rest)
        by_key = problem.to_torch(weight_gradients)
        results["weight gradients"] = {name: by_key[name] for name in oracle["weight gradients"]}
    return results


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
    return {group: named for group, named in groups.items() if named}


def _named(tree: Any, name: str) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {name + jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _floating(named: Arrays) -> Arrays:
    return {name: a for name, a in named.items() if jnp.issubdtype(a.dtype, jnp.floating)}


def _cotangents(problem: Problem, results: Results) -> list[np.ndarray]:
    """Random gradients with respect to each floating array of the result."""
    rng = np.random.default_rng(problem.seed)
    arrays = [a for group in GROUPS[:2] for a in _floating(results.get(group, {})).values()]
    return [in_every_dtype(rng.standard_normal(a.shape)) for a in arrays]


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()


def _gradient(tensor: torch.Tensor) -> np.ndarray:
    """Zero where nothing depends on the tensor, as in JAX."""
    return np.zeros(tensor.shape) if tensor.grad is None else _numpy(tensor.grad)


def _not_finite(oracle: Results) -> list[str]:
    return [
        f"{group}, {name}: {count} of {array.size} numbers of the float64 torch side are not finite"
        for group, named in oracle.items()
        for name, array in named.items()
        if (count := np.count_nonzero(~np.isfinite(array)))
    ]


def _mismatches(oracle: Results, ours: Results, dtype: str) -> list[str]:
    """What is wrong in kind with our results."""
    faults = []
    if not any(like.size for like in oracle.get("outputs", {}).values()):
        faults.append("outputs: all of them are empty, there is nothing to compare")
    for group in GROUPS[:2]:
        expected, actual = oracle.get(group, {}), ours.get(group, {})
        if expected.keys() != actual.keys():
            faults.append(f"{group}: torch returns {[*expected]}, JAX {[*actual]}")
            continue
        for name, like in expected.items():
            array = actual[name]
            if array.shape != like.shape:
                fault = f"shape {like.shape} in torch, {array.shape} in JAX"
            elif _floating({"": array}).keys() != _floating({"": like}).keys():
                fault = f"{like.dtype} in torch, {array.dtype} in JAX"
            elif not _floating({"": like}) and (count := np.count_nonzero(array != like)):
                fault = f"{count} of {array.size} {like.dtype} differ"
            elif dtype == "float64" and _floating({"": array}) and array.dtype != np.float64:
                fault = f"JAX computes in {array.dtype} where float64 was asked for"
            else:
                continue
            faults.append(f"{group}, {name}: {fault}")
    return faults
