"""The long convolution, `y_t = Σ_s h_{t−s} v_s`."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from benchmarks.problem import FORWARD, OURS, Contenders, Problem, Work, operator
from jax_models.ops import long_conv


@dataclasses.dataclass(frozen=True)
class LongConv(Problem):
    """Its sizes."""

    batch: int
    features: int
    time: int

    @property
    def name(self) -> str:
        """The sizes."""
        return f"{self.batch} × {self.features}, L {self.time}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of v and y."""
        return self.batch, self.features, self.time

    def arrays(self):
        """Inputs, and a filter for each feature that decays."""
        rng = np.random.default_rng(0)
        h = rng.standard_normal(self.shape[1:]) * np.exp(-4 * np.arange(self.time) / self.time)
        return {"v": rng.standard_normal(self.shape, np.float32), "h": h.astype(np.float32)}

    def cotangent(self):
        """Of y."""
        return np.random.default_rng(1).standard_normal(self.shape, np.float32)

    def oracle(self):
        """By numpy's FFT."""
        arrays = (*self.arrays().values(), self.cotangent())
        v_f, h_f, g_f = (np.fft.rfft(x.astype(np.float64), 2 * self.time) for x in arrays)
        products = {"y": v_f * h_f, "v": g_f * h_f.conj(), "h": (g_f * v_f.conj()).sum(axis=0)}
        return {
            name: np.fft.irfft(x, 2 * self.time)[..., : self.time] for name, x in products.items()
        }

    def work(self, part):
        """V and h in, y out, and real FFTs of 2 L numbers: 5/2 n log₂ n operations each."""
        rows, length = self.batch * self.features, 2 * self.time
        transforms, arrays, filters = (2, 2, 1) if part == FORWARD else (4, 4, 2)
        return Work(
            flops=2.5 * length * math.log2(length) * (transforms * rows + filters * self.features),
            num_bytes=4 * self.time * (arrays * rows + filters * self.features),
        )

    def targets(self, part, platform):
        """What the time over theirs should be."""
        if platform != "cpu":
            return {"torch": 1.0}
        return {"torch": 1.35, "plain jnp.fft": 0.8} if part == FORWARD else {"torch": 1.0}


def problems(quick: bool) -> list[LongConv]:
    """Filters as long as the sequence."""
    sizes = [(4, 256, 1024), (4, 256, 4096), (4, 256, 16384), (64, 386, 128)]
    return [LongConv(*size) for size in (sizes[:1] if quick else sizes)]


contenders = Contenders()


@contenders.jax(OURS)
def ours(problem: LongConv):
    """Our operator."""
    return operator(problem, long_conv)


@contenders.jax("plain jnp.fft")
def plain(problem: LongConv):
    """What one writes first in JAX."""

    def conv(v, h):
        n = 2 * v.shape[-1]
        return jnp.fft.irfft(jnp.fft.rfft(v, n) * jnp.fft.rfft(h, n)[None], n)[..., : n // 2]

    return operator(problem, conv)


@contenders.torch("torch.fft")
def torch_fft(problem: LongConv):
    """The Annotated Hyena's."""
    import torch

    def conv(v, h):
        n = 2 * v.shape[-1]
        product = torch.fft.rfft(v, n) * torch.fft.rfft(h, n)
        return torch.fft.irfft(product, n)[..., : n // 2]

    return operator(problem, conv)
