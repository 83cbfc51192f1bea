"""minGRU, forward and with its gradients."""

import math

import numpy as np

from benchmarks.problem import FORWARD, OURS, Contenders, Sequences, Work, operator
from jax_models.ops import MinRNNState, min_gru


class Layer(Sequences):
    """One layer that is as wide as its inputs."""

    def arrays(self):
        """Inputs, and weights as torch initializes them."""
        rng = np.random.default_rng(0)
        bound = self.features**-0.5
        weights = rng.uniform(-bound, bound, (self.features + 1, 2 * self.features))
        *kernel, bias = weights.astype(np.float32)
        x = rng.standard_normal(self.shape, np.float32)
        return {"x": x, "kernel": np.stack(kernel), "bias": bias}

    def oracle(self):
        """Computes the twin's equation in float64."""
        import torch

        leaves = {name: torch.tensor(a).double() for name, a in self.arrays().items()}
        leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
        y = step_by_step(**leaves)
        cotangent = torch.tensor(self.cotangent()).double()
        gradients = torch.autograd.grad(y, [*leaves.values()], cotangent)
        named = dict(zip(leaves, gradients, strict=True))
        return {"y": y.detach().numpy()} | {name: g.numpy() for name, g in named.items()}

    def work(self, part):
        """The matrix product of the gates, and the two products of its gradients."""
        product = 2 * math.prod(self.shape) * 2 * self.features
        return Work(flops=product if part == FORWARD else 3 * product)

    def targets(self, part, platform):
        """The largest allowed ratio of our time to torch's."""
        return {"torch": 1.0}


def step_by_step(x, kernel, bias):
    """Computes the equation step by step."""
    import torch

    gate, candidate = (x @ kernel + bias).chunk(2, dim=-1)
    z = torch.sigmoid(gate)
    h, outputs = torch.zeros_like(x[:, 0]), []
    for z_t, candidate_t in zip(z.unbind(1), candidate.unbind(1), strict=True):
        h = (1 - z_t) * h + z_t * candidate_t
        outputs.append(h)
    return torch.stack(outputs, dim=1)


def problems(quick: bool) -> list[Layer]:
    """A layer of a language model, and a long sequence."""
    sizes = [(32, 128, 256), (1, 8192, 256)]
    return [Layer(*size) for size in (sizes[:1] if quick else sizes)]


contenders = Contenders()


@contenders.jax(OURS)
def ours(problem: Layer):
    """Our operator with its default options."""
    import jax.numpy as jnp

    def layer(x, kernel, bias):
        state = MinRNNState(jnp.zeros((problem.batch, problem.features)))
        return min_gru(x, state, kernel=kernel, bias=bias)[0]

    return operator(problem, layer)


@contenders.torch("torch loop")
def torch_loop(problem: Layer):
    """The straightforward version in torch."""
    return operator(problem, step_by_step)
