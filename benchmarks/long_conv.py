"""`y_t = Σ_s h_{t−s} v_s`, as long as the sequence: ours and its peers."""

import jax.numpy as jnp
import numpy as np
import torch

from jax_models.ops import long_conv

SHAPES = [(4, 1024, 256), (4, 4096, 256), (4, 16384, 256), (64, 128, 386)]


def inputs(shape: tuple[int, ...]) -> list[np.ndarray]:
    """V (batch, features, time), a filter h (features, time), and the gradient of y."""
    batch, time, features = shape
    rng = np.random.default_rng(0)
    v, cotangent = rng.standard_normal((2, batch, features, time))
    h = rng.standard_normal((features, time)) * np.exp(-4 * np.arange(time) / time)
    return [v, h, cotangent]


def oracle(v, h, cotangent) -> list[np.ndarray]:
    """Y and the gradients of v and h, by numpy's FFT in float64."""
    time = v.shape[-1]
    v_f, h_f, g_f = (np.fft.rfft(x, 2 * time) for x in (v, h, cotangent))
    products = (v_f * h_f, g_f * h_f.conj(), (g_f * v_f.conj()).sum(axis=0))
    return [np.fft.irfft(x, 2 * time)[..., :time] for x in products]


def ours():
    """Our operator."""
    return long_conv


def plain():
    """What one writes first in JAX."""

    def conv(v, h):
        n = 2 * v.shape[-1]
        return jnp.fft.irfft(jnp.fft.rfft(v, n) * jnp.fft.rfft(h, n)[None], n)[..., : n // 2]

    return conv


def torch_fft():
    """The Annotated Hyena's."""

    def conv(v, h):
        n = 2 * v.shape[-1]
        product = torch.fft.rfft(v, n) * torch.fft.rfft(h, n)
        return torch.fft.irfft(product, n)[..., : n // 2]

    return conv


JAX = {"twinscan": ours, "plain jnp.fft": plain}
TORCH = {"torch.fft": torch_fft}
