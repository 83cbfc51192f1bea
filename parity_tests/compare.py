"""Run a twin pair forward and backward and measure both against the float64 twin."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from jax_models import to_torch
from parity_tests.cases import DTYPES, Case, in_every_dtype
from parity_tests.tolerance import Error, group_error

GROUPS = ("outputs", "final state", "input gradient", "weight gradients")

Results = dict[str, dict[str, np.ndarray]]
"""Arrays by group and name."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """What both sides run on. Tokens have no gradient, and their models' twins take no state."""

    case: Case
    twin: torch.nn.Module
    x: np.ndarray
    state: Any
    lengths: np.ndarray | None
    seed: int

    @property
    def is_tokens(self) -> bool:
        """Are the inputs tokens?"""
        return np.issubdtype(self.x.dtype, np.integer)

    def cotangents(self, results: Results) -> list[np.ndarray]:
        """Random gradients with respect to the outputs and each final state."""
        rng = np.random.default_rng(self.seed)
        outputs = [results["outputs"]["y"], *results["final state"].values()]
        return [in_every_dtype(rng.standard_normal(a.shape)) for a in outputs]


def problem(case: Case, *, given_state: bool = True, lengths=None, seed: int = 0) -> Problem:
    """The case's standard problem: random weights, inputs and (if given) initial state."""
    x = case.inputs(seed + 1)
    given_state = given_state and not case.prefix and np.issubdtype(x.dtype, np.floating)
    return Problem(
        case=case,
        twin=case.build_twin(seed),
        x=x,
        state=case.state(seed + 2) if given_state else None,
        lengths=lengths,
        seed=seed + 3,
    )


def run_torch(problem: Problem, dtype: str) -> Results:
    """The twin's outputs and final states, and the gradients that random cotangents give."""
    case, torch_dtype = problem.case, getattr(torch, dtype)
    twin = case.twin().to(torch_dtype)
    twin.load_state_dict(problem.twin.state_dict())
    x = torch.tensor(problem.x)
    state = None
    inputs: dict[str, torch.Tensor] = {}
    if not problem.is_tokens:
        inputs["x"] = x = x.to(torch_dtype).requires_grad_()
    if problem.state is not None:
        inputs |= {
            name: torch.tensor(leaf, dtype=torch_dtype, requires_grad=True)
            for name, leaf in _named(problem.state)
        }
        state = tuple(inputs.values())[1:]
    lengths = None if problem.lengths is None else torch.tensor(problem.lengths)
    y, last = case.call(twin, x, state, lengths)
    names = [name for name, _ in _named(case.state())] if last else []
    results: Results = {
        "outputs": {"y": _numpy(y)},
        "final state": {n: _numpy(s) for n, s in zip(names, last, strict=True)},
    }
    cotangents = [torch.tensor(c, dtype=torch_dtype) for c in problem.cotangents(results)]
    torch.autograd.backward([y, *last], cotangents)
    results["input gradient"] = {name: _numpy(t.grad) for name, t in inputs.items()}
    results["weight gradients"] = {
        name: _numpy(w.grad)
        for name, w in twin.named_parameters(remove_duplicate=False)
        if w.requires_grad
    }
    return results


def run_jax(problem: Problem, dtype: str, oracle: Results, platform: str = "cpu") -> Results:
    """The same of the JAX layer, under the oracle's names."""
    case = problem.case
    cotangents = problem.cotangents(oracle)
    with jax.default_device(jax.devices(platform)[0]), jax.default_matmul_precision("highest"):
        graphdef, params, rest = nnx.split(
            case.build_layer(problem.twin, jnp.dtype(dtype)), nnx.Param, ...
        )
        tokens = jnp.asarray(problem.x) if problem.is_tokens else None
        x = None if problem.is_tokens else jnp.asarray(problem.x, dtype)

        @jax.jit
        def forward_and_backward(params, x, state):
            def forward(params, x, state):
                layer = nnx.merge(graphdef, params, rest)
                y, last = layer(tokens if x is None else x, state, lengths=problem.lengths)
                return [y, *jax.tree.leaves(last)][: len(cotangents)]

            outputs, pullback = jax.vjp(forward, params, x, state)
            gradients = [jnp.asarray(c, y.dtype) for c, y in zip(cotangents, outputs, strict=True)]
            return outputs, pullback(gradients)

        (y, *last), (params_gradient, x_gradient, state_gradient) = forward_and_backward(
            params, x, jax.tree.map(jnp.asarray, problem.state)
        )
    input_gradients = {} if x is None else {"x": np.asarray(x_gradient)}
    input_gradients |= {name: np.asarray(leaf) for name, leaf in _named(state_gradient)}
    gradients = to_torch(nnx.merge(graphdef, params_gradient, rest), case.layout)
    return {
        "outputs": {"y": np.asarray(y)},
        "final state": dict(zip(oracle["final state"], map(np.asarray, last), strict=True)),
        "input gradient": input_gradients,
        "weight gradients": {name: gradients[name] for name in oracle["weight gradients"]},
    }


def measure(
    problem: Problem, dtypes: Iterable[str] = DTYPES, platform: str = "cpu"
) -> dict[str, dict[str, Error]]:
    """The errors by dtype, of those that the case has, and group.

    Tokens have no group of input gradients.
    """
    oracle = run_torch(problem, "float64")
    torch32 = run_torch(problem, "float32")
    measured = {}
    for dtype in (dtype for dtype in dtypes if dtype in problem.case.dtypes):
        known = {"float64": oracle, "float32": torch32}
        torch_results = known[dtype] if dtype in known else run_torch(problem, dtype)
        jax_results = run_jax(problem, dtype, oracle, platform)
        measured[dtype] = {
            group: group_error(
                jnp.dtype(dtype),
                oracle=oracle[group],
                torch=torch_results[group],
                jax=jax_results[group],
                torch32=torch32[group],
            )
            for group in GROUPS
            if oracle[group]
        }
    return measured


def _named(state) -> list[tuple[str, Any]]:
    """A state's arrays and their names."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return [(jax.tree_util.keystr(path).lstrip("."), leaf) for path, leaf in leaves]


def _numpy(tensor: torch.Tensor | None) -> np.ndarray:
    if tensor is None:
        raise ValueError("a tensor got no gradient")
    return tensor.detach().double().cpu().numpy()
