"""Our layers, and torch's."""

from typing import Any

from flax import nnx

import jax_models
from benchmarks.families.gated.problem import Gated, torch_module, torch_outputs
from benchmarks.problem import NATIVE, OURS, Contenders, Function
from jax_models import from_torch, to_torch

contenders = Contenders()


@contenders.jax(OURS)
def ours(problem: Gated):
    """Our layer, without the kernels of twinscan-native, which are a contender of their own."""
    return by_method(problem, "auto")


@contenders.jax(NATIVE, kernels=True)
def ours_native(problem: Gated):
    """Our layer by the kernels of twinscan-native."""
    return by_method(problem, "native")


def by_method(problem: Gated, method: str) -> Function:
    """Our layer, as a pure function through `nnx.split`."""
    arrays = problem.arrays()
    x = arrays.pop("x")
    options: dict[str, Any] = {"bidirectional": problem.bidirectional, "method": method}
    options["rngs"] = nnx.Rngs(0)
    layer = getattr(jax_models, problem.cell)(problem.hidden, problem.hidden, **options)
    graphdef, weights, rest = nnx.split(from_torch(layer, arrays), nnx.Param, ...)

    def apply(params):
        x, weights = params
        return nnx.merge(graphdef, weights, rest)(x, lengths=problem.lengths)[0]

    def named(gradients):
        x, weights = gradients
        return {"x": x, **to_torch(nnx.merge(graphdef, weights, rest))}

    return Function((x, weights), apply, named)


@contenders.torch("torch.nn")
def torch_nn(problem: Gated):
    """The layer of torch, which uses cuDNN if it is available."""
    import torch

    arrays = problem.arrays()
    x = torch.tensor(arrays.pop("x"), requires_grad=True)
    module = torch_module(problem)
    module.load_state_dict({name: torch.tensor(w) for name, w in arrays.items()})
    leaves = {"x": x, **dict(module.named_parameters())}
    return Function(leaves, lambda leaves: torch_outputs(problem, module, leaves["x"]))
