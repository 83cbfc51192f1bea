"""The long convolution, `y_t = Σ_s h_{t−s} v_s`."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from benchmarks.problem import FORWARD, OURS, Contenders, Problem, Work, operator
from jax_models.ops import long_conv


@dataclasses.dataclass(frozen=True)
class LongConv(Problem):
    """A long convolution at some sizes."""

    batch: int
    features: int
    time: int

    @property
    def name(self) -> str:
        """The sizes, in a few words."""
        return f"{self.batch} × {self.features}, L {self.time}"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of v and y."""
        return self.batch, self.features, self.time

    def arrays(self):
        """Inputs, and a decaying filter for each feature."""
        rng = np.random.default_rng(0)
        h = rng.standard_normal(self.shape[1:]) * np.exp(-4 * np.arange(self.time) / self.time)
        return {"v": rng.standard_normal(self.shape, np.float32), "h": h.astype(np.float32)}

    def cotangent(self):
        """A random gradient of y."""
        return np.random.default_rng(1).standard_normal(self.shape, np.float32)

    def oracle(self):
        """Computes the convolution with NumPy's FFT, in float64."""
        arrays = (*self.arrays().values(), self.cotangent())
        v_f, h_f, g_f = (np.fft.rfft(x.astype(np.float64), 2 * self.time) for x in arrays)
        products = {"y": v_f * h_f, "v": g_f * h_f.conj(), "h": (g_f * v_f.conj()).sum(axis=0)}
        return {
            name: np.fft.irfft(x, 2 * self.time)[..., : self.time] for name, x in products.items()
        }

    def work(self, part):
        """Reads v and h, writes y. A real FFT of n = 2 L numbers takes 5/2 n log₂ n operations."""
        rows, length = self.batch * self.features, 2 * self.time
        transforms, arrays, filters = (2, 2, 1) if part == FORWARD else (4, 4, 2)
        return Work(
            flops=2.5 * length * math.log2(length) * (transforms * rows + filters * self.features),
            num_bytes=4 * self.time * (arrays * rows + filters * self.features),
        )

    def targets(self, part, platform):
        """The largest allowed ratios of our time to the peers'."""
        if platform != "cpu":
            return {"torch": 1.0}
        return {"torch": 1.35, "plain jnp.fft": 0.8} if part == FORWARD else {"torch": 1.0}


def problems(quick: bool) -> list[LongConv]:
    """Sequences with filters of the same length."""
    sizes = [(4, 256, 1024), (4, 256, 4096), (4, 256, 16384), (64, 386, 128)]
    return [LongConv(*size) for size in (sizes[:1] if quick else sizes)]


contenders = Contenders()


@contenders.jax(OURS)
def ours(problem: LongConv):
    """Our operator with its default options."""
    return operator(problem, long_conv)


@contenders.jax("plain jnp.fft")
def plain(problem: LongConv):
    """The straightforward version in JAX."""

    def conv(v, h):
        n = 2 * v.shape[-1]
        return jnp.fft.irfft(jnp.fft.rfft(v, n) * jnp.fft.rfft(h, n)[None], n)[..., : n // 2]

    return operator(problem, conv)


@contenders.torch("torch.fft")
def torch_fft(problem: LongConv):
    """The Annotated Hyena's convolution."""
    import torch

    def conv(v, h):
        n = 2 * v.shape[-1]
        product = torch.fft.rfft(v, n) * torch.fft.rfft(h, n)
        return torch.fft.irfft(product, n)[..., : n // 2]

    return operator(problem, conv)
