"""The long convolution by the fast Fourier transform, in two forms."""

from collections.abc import Callable
from functools import partial
from itertools import starmap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jaxtyping import Array, Complex, Float

from jax_models.ops.conv.definition import LongConv
from jax_models.ops.linear_map import linear_map
from jax_models.ops.shard_map_axes import match_varying_axes

FEATURE_PARTS = 4
"""The number of parts into which "twisted" divides the features if it does not loop. XLA's CPU
backend runs each transform on one core, and several transforms in parallel.
"""
LOOP_BELOW, CHUNK_BYTES = 512, 2**17
"""Transforms of fewer steps than LOOP_BELOW are limited by memory bandwidth. A loop over chunks of
CHUNK_BYTES keeps them in a core's cache.
"""


@jax.jit  # else eager calls would trace the transforms each time
def run_rfft(call: LongConv) -> Array:
    """Multiplies the spectra of v and h at length 2T, for all features at once."""
    return _convolution(_rfft, call.v, call.h)


@jax.jit
def run_twisted(call: LongConv) -> Array:
    """Multiplies v and h by e^{iπt/2T} and uses complex transforms of length T.

    The terms that a circular convolution wraps around then become imaginary.
    """
    return _convolution(_twisted, call.v, call.h)


Signals = tuple[Float[Array, "_ features time"], ...]
Spectra = tuple[Complex[Array, "_ features frequencies"], ...]


Transform = Callable[..., Signals]
"""`transform(product, *signals)` applies `product` to the spectra of the signals, and transforms
the results back.
"""


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _convolution(transform: Transform, v, h) -> Array:
    (y,) = transform(_convolve, v, h[None])
    return y


@_convolution.defjvp
def _convolution_jvp(transform: Transform, primals, tangents):
    y = _convolution(transform, *primals)
    return y, linear_map(_tangent, _gradient, primals, tangents, transform)


def _tangent(transform: Transform, residuals, tangents):
    """`v ∗ dh + dv ∗ h`."""
    (v, h), (d_v, d_h) = residuals, tangents
    (d_y,) = transform(_convolve_each, v, h[None], d_v, d_h[None])
    return d_y


def _gradient(transform: Transform, residuals, cotangent):
    """The transpose of `_tangent`, which consists of correlations."""
    v, h = residuals
    v_gradient, h_gradient = transform(_correlate, v, h[None], cotangent)
    return v_gradient, h_gradient[0]


def _convolve(v: Complex[Array, "..."], h: Complex[Array, "..."]) -> Spectra:
    return (v * h,)


def _convolve_each(v, h, d_v, d_h) -> Spectra:
    return (v * d_h + d_v * h,)


def _correlate(v, h, cotangent) -> Spectra:
    """Correlates the cotangent with the filter, and with the inputs of all rows."""
    return cotangent * h.conj(), jnp.sum(cotangent * v.conj(), axis=0, keepdims=True)


def _fast_length(length: int, *, real: bool) -> int:
    from scipy.fft import next_fast_len  # importing it takes 0.2 s

    fast: Any = next_fast_len(max(length, 1), real)
    return fast


def _rfft(product, *signals: Float[Array, "_ features time"]) -> Signals:
    time = signals[0].shape[-1]
    n = _fast_length(2 * time, real=True)
    spectra = product(*(jnp.fft.rfft(x, n) for x in signals))
    return tuple(jnp.fft.irfft(spectrum, n)[..., :time] for spectrum in spectra)


def _twisted(product, *signals: Float[Array, "_ features time"]) -> Signals:
    _, features, time = signals[0].shape
    n = _fast_length(time, real=False)
    dtype = jnp.complex128 if signals[0].dtype == jnp.float64 else jnp.complex64
    twist = np.exp(0.5j * np.pi * np.arange(time) / n).astype(dtype)

    def twisted(x, twist):
        return x.astype(dtype) * jnp.broadcast_to(twist, x.shape)

    def convolve(*signals):
        spectra = product(*(jnp.fft.fft(twisted(x, twist), n) for x in signals))
        signals = (jnp.fft.ifft(spectrum)[..., :time] for spectrum in spectra)
        return tuple(twisted(x, twist.conj()).real for x in signals)

    unknown = is_symbolic_dim(signals[0].size)
    chunks = -(-signals[0].size * signals[0].dtype.itemsize // CHUNK_BYTES)
    if unknown or time >= LOOP_BELOW or chunks <= FEATURE_PARTS:
        return _in_parallel(convolve, signals, max(min(FEATURE_PARTS, features), 1))
    return _feature_loop(convolve, signals, -(-features // chunks))


def _in_parallel(convolve, signals: Signals, count: int) -> Signals:
    """Applies `convolve` to `count` parts of the features in parallel."""
    parts = zip(*(jnp.array_split(x, count, axis=1) for x in signals), strict=True)
    return tuple(jnp.concatenate(x, axis=1) for x in zip(*starmap(convolve, parts), strict=True))


def _feature_loop(convolve, signals: Signals, size: int) -> Signals:
    """Applies `convolve` to `size` features at a time, in a loop."""
    features = signals[0].shape[1]

    def turn(i, outputs):
        start = i * size  # both slices clamp it, so the last part may overlap the one before
        part = (jax.lax.dynamic_slice_in_dim(x, start, size, axis=1) for x in signals)
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(whole, new, start, axis=1)
            for whole, new in zip(outputs, convolve(*part), strict=True)
        )

    outputs = [jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(convolve, *signals)]
    outputs = match_varying_axes((*outputs, *signals))[: len(outputs)]
    return jax.lax.fori_loop(0, -(-features // size), turn, outputs)
