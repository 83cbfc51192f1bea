"""Causal attention."""

import dataclasses

import jax
import numpy as np

from benchmarks.problem import FORWARD, OURS, Contenders, Problem, Work, operator
from jax_models.ops import attention


@dataclasses.dataclass(frozen=True)
class Attention(Problem):
    """Causal attention at some sizes."""

    batch: int
    time: int
    heads: int
    features: int

    @property
    def name(self) -> str:
        """The sizes, in a few words."""
        return f"{self.batch} × {self.time}, {self.heads} heads of {self.features}"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of q, k, v and y."""
        return self.batch, self.time, self.heads, self.features

    def arrays(self):
        """q, k and v, each (batch, time, heads, features of a head)."""
        q, k, v = np.random.default_rng(0).standard_normal((3, *self.shape), np.float32)
        return {"q": q, "k": k, "v": v}

    def cotangent(self):
        """A random gradient of y."""
        return np.random.default_rng(1).standard_normal(self.shape, np.float32)

    def oracle(self):
        """Computes the formula in float64."""
        q, k, v = (x.astype(np.float64) for x in self.arrays().values())
        cotangent, scale = self.cotangent(), self.features**-0.5
        scores = scale * np.einsum("bthf,bshf->bhts", q, k, optimize=True)
        scores = np.where(np.tri(self.time, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        of_weights = np.einsum("bthf,bshf->bhts", cotangent, v, optimize=True)
        of_scores = of_weights - (weights * of_weights).sum(axis=-1, keepdims=True)
        of_scores *= scale * weights
        return {
            "y": np.einsum("bhts,bshf->bthf", weights, v, optimize=True),
            "q": np.einsum("bhts,bshf->bthf", of_scores, k, optimize=True),
            "k": np.einsum("bhts,bthf->bshf", of_scores, q, optimize=True),
            "v": np.einsum("bhts,bthf->bshf", weights, cotangent, optimize=True),
        }

    def work(self, part):
        """Two products over half of the T × T weights, and four more backward; q, k, v and y."""
        products, arrays = (2, 4) if part == FORWARD else (6, 12)
        size = self.batch * self.time * self.heads * self.features
        return Work(flops=products * self.time * size, num_bytes=4 * arrays * size)


def problems(quick: bool) -> list[Attention]:
    """The sizes of the Annotated Hyena, and a longer sequence."""
    sizes = [(64, 128, 6, 64), (4, 1024, 6, 64)]
    return [Attention(*size) for size in (sizes[:1] if quick else sizes)]


contenders = Contenders()


@contenders.jax(OURS)
def ours(problem: Attention):
    """Our operator with its default options."""
    return operator(problem, attention)


@contenders.jax("jax.nn.dot_product_attention")
def dot_product_attention(problem: Attention):
    """JAX's own attention."""

    def causal(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    return operator(problem, causal)


@contenders.torch("torch SDPA")
def torch_sdpa(problem: Attention):
    """The `scaled_dot_product_attention` of torch."""
    import torch

    def causal(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2)

    return operator(problem, causal)
