"""Causal attention."""

import dataclasses
from functools import partial

import jax
import numpy as np

from benchmarks.problem import (
    FORWARD,
    NATIVE,
    OURS,
    CannotSolve,
    Contenders,
    Problem,
    Work,
    operator,
)
from jax_models.ops import attention


@dataclasses.dataclass(frozen=True)
class Attention(Problem):
    """Causal attention at some sizes, with grouped queries or a window on request."""

    batch: int
    time: int
    heads: int
    features: int
    kv_heads: int | None = None
    """The number of heads of the keys and values. None: as many as of the queries."""
    window: int | None = None
    """The number of steps that a query sees. None: all steps up to its own."""
    rounds = 20

    @property
    def name(self) -> str:
        """The sizes, in a few words."""
        grouped = "" if self.kv_heads is None else f", {self.kv_heads} of keys"
        windowed = "" if self.window is None else f", window {self.window}"
        return (
            f"{self.batch} × {self.time}, {self.heads} heads of {self.features}{grouped}{windowed}"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of q and y."""
        return self.batch, self.time, self.heads, self.features

    def mask(self) -> np.ndarray:
        """Whether a step (row) sees a key (column)."""
        steps = np.arange(self.time)
        past = steps[:, None] - steps
        return (past >= 0) & (past < (self.window or self.time))

    def arrays(self):
        """q, k and v, each (batch, time, heads, features of a head)."""
        rng = np.random.default_rng(0)
        of_keys = (self.batch, self.time, self.kv_heads or self.heads, self.features)
        shapes = {"q": self.shape, "k": of_keys, "v": of_keys}
        return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}

    def cotangent(self):
        """A random gradient of y."""
        return np.random.default_rng(1).standard_normal(self.shape, np.float32)

    def oracle(self):
        """Computes the formula in float64, one head at a time because all scores are large."""
        arrays, cotangent, mask = self.arrays(), self.cotangent(), self.mask()
        shared = self.heads // (self.kv_heads or self.heads)
        found = {name: np.zeros(x.shape) for name, x in {"y": cotangent, **arrays}.items()}
        for row, head in np.ndindex(self.batch, self.heads):
            of_query, of_key = (row, slice(None), head), (row, slice(None), head // shared)
            q, of_y = (x[of_query].astype(np.float64) for x in (arrays["q"], cotangent))
            k, v = (arrays[name][of_key].astype(np.float64) for name in "kv")
            q *= self.features**-0.5
            scores = np.where(mask, q @ k.T, -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            of_scores = of_y @ v.T
            of_scores -= (weights * of_scores).sum(axis=-1, keepdims=True)
            of_scores *= weights
            found["y"][of_query] = weights @ v
            found["q"][of_query] = self.features**-0.5 * of_scores @ k
            found["k"][of_key] += of_scores.T @ q
            found["v"][of_key] += weights.T @ of_y
        return found

    def work(self, part):
        """Two products over the weights in the mask, and four more backward; q, k, v and y."""
        products, reads = (2, 1) if part == FORWARD else (6, 3)
        seen = 2 * self.batch * self.heads * self.features * int(self.mask().sum())
        sizes = 2 * (self.heads + (self.kv_heads or self.heads)) * self.features
        return Work(flops=products * seen, num_bytes=4 * reads * self.batch * self.time * sizes)

    def targets(self, part, platform):
        """The largest allowed ratio of our time to torch's."""
        return {"torch SDPA": 1.4} if platform == "cpu" else {}

    def targets_with_kernels(self, part, platform):
        """The kernels are not slower than torch's."""
        return {"torch SDPA": 1.0}


def problems(quick: bool) -> list[Attention]:
    """From many short rows to a long one, with small and large heads, some grouped or windowed."""
    if quick:
        return [Attention(64, 128, 6, 64), Attention(2, 512, 8, 64, kv_heads=2, window=128)]
    return [
        Attention(8, 256, 8, 64),
        Attention(8, 256, 4, 128, kv_heads=2),
        Attention(4, 512, 8, 64, kv_heads=2),
        Attention(2, 512, 8, 128),
        Attention(4, 1024, 6, 64),
        Attention(1, 1024, 8, 128, kv_heads=4),
        Attention(2, 1024, 8, 64, kv_heads=2, window=256),
        Attention(2, 2048, 8, 64),
        Attention(1, 2048, 4, 128, window=512),
        Attention(1, 4096, 8, 64),
        Attention(1, 4096, 8, 128, kv_heads=2),
        Attention(1, 4096, 8, 64, window=256),
    ]


contenders = Contenders()


@contenders.jax(OURS)
def ours(problem: Attention):
    """Our operator, without the kernels of twinscan-native, which are a contender of their own."""
    return by_method(problem, "auto")


@contenders.jax(NATIVE, kernels=True)
def ours_native(problem: Attention):
    """Our operator by the kernels of twinscan-native."""
    return by_method(problem, "native")


def by_method(problem: Attention, method: str):
    """Our operator, by this form."""
    return operator(problem, partial(attention, window=problem.window, method=method))


@contenders.jax("jax.nn.dot_product_attention")
def dot_product_attention(problem: Attention):
    """JAX's own attention."""
    if problem.time >= 4096:
        raise CannotSolve("a call takes seconds, because it computes all scores")
    window = None if problem.window is None else (problem.window - 1, 0)
    causal = partial(jax.nn.dot_product_attention, is_causal=True, local_window_size=window)
    return operator(problem, lambda q, k, v: causal(q, k, v))


@contenders.torch("torch SDPA")
def torch_sdpa(problem: Attention):
    """The `scaled_dot_product_attention` of torch."""
    import torch

    # torch knows no windows, so it gets a mask.
    mask = None if problem.window is None else torch.tensor(problem.mask())

    def causal(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, enable_gqa=problem.kv_heads is not None
        )
        return y.transpose(1, 2)

    return operator(problem, causal)
