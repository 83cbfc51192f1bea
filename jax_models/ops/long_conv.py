"""The causal convolution with a filter as long as the sequence."""

from collections.abc import Callable
from functools import partial
from itertools import starmap
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import scipy.fft
from jax.export import is_symbolic_dim
from jaxtyping import Array, Complex, Float

from jax_models.checks.arguments import checked
from jax_models.ops.affine import common_carry_dtype
from jax_models.ops.linear_map import linear_map
from jax_models.ops.shard_map_axes import match_varying_axes

LongConvMethod = Literal["auto", "rfft", "twisted"]

FEATURE_PARTS = 4
"""The number of parts into which "twisted" divides the features if it does not loop. XLA's CPU
backend runs each transform on one core, and several transforms in parallel.
"""
LOOP_BELOW, CHUNK_BYTES = 512, 2**17
"""Transforms of fewer steps than LOOP_BELOW are limited by memory bandwidth. A loop over chunks of
CHUNK_BYTES keeps them in a core's cache.
"""


@checked()
def long_conv(
    v: Float[Array, "batch features time"],
    h: Float[Array, "features taps"],
    skip: Float[Array, " features"] | None = None,
    *,
    method: LongConvMethod = "auto",
    time_axis: str | None = None,
) -> Float[Array, "batch features time"]:
    """`y_t = Σ_{s ≤ t} h_{t−s} v_s + skip ⊙ v_t`, in O(T log T) by FFT.

    Time is the last axis. The computation is in at least float32, because there is no FFT in
    bfloat16, and y has the dtype of v. If T is not a product of small primes, the inputs are padded
    to the next length that is. Rounding errors are relative to the largest output of a row: later
    inputs change earlier outputs by about one ulp of that output, and a NaN makes the whole row
    NaN.

    Args:
        v: the inputs.
        h: a filter for each feature, starting with the tap of the current input.
        skip: the factor by which the current input is multiplied and added to the output.
        method: "rfft" multiplies the spectra of v and h at length 2T, for all features at once.
            "twisted" multiplies v and h by e^{iπt/2T} and uses complex transforms of length T,
            because the terms that a circular convolution wraps around then become imaginary. It
            transforms parts of the features in parallel or, if there are many short rows, in a
            loop. "auto" is "twisted" on a CPU, and "rfft" elsewhere.
        time_axis: the mesh axis over which the time of v is divided, inside a `jax.shard_map`. h
            has the taps of all steps. Each device convolves all steps of a part of the features.

    Raises:
        TypeError: v, h or skip is not floating.
        ValueError: the shapes do not fit each other, the features cannot be divided equally over
            the axis, or there is no such method.

    """
    if is_symbolic_dim(v.shape[2]):
        raise NotImplementedError(
            f"v: expected a known number of steps, as an FFT needs, got {v.shape[2]}: export one "
            "length, pad shorter rows to it and give their `lengths`"
        )
    count = 1 if time_axis is None else jax.lax.axis_size(time_axis)
    if h.shape[1] != count * v.shape[2]:
        raise ValueError(
            f"h: expected {count * v.shape[2]} taps, as many as steps, got {h.shape[1]}"
        )
    dtype = common_carry_dtype(v, h)
    part, exchange = v.astype(dtype), None
    if time_axis is not None:
        if v.shape[1] % count:
            raise ValueError(
                f"v: expected features that divide over the {count} devices of the axis "
                f"{time_axis!r}, got {v.shape[1]}"
            )
        # Each device has some steps of all features, and exchanges them for all steps of some
        # features.
        exchange = partial(jax.lax.all_to_all, axis_name=time_axis, tiled=True)
        part = exchange(part, split_axis=1, concat_axis=2)
        size = h.shape[0] // count
        h = jax.lax.dynamic_slice_in_dim(h, jax.lax.axis_index(time_axis) * size, size)
    y = fft_conv(method, *match_varying_axes((part, h.astype(dtype))))
    return with_skip(exchange(y, split_axis=2, concat_axis=1) if exchange else y, v, skip)


def with_skip(y, v, skip) -> Float[Array, "batch features time"]:
    """`y + skip ⊙ v`, in the dtype of v."""
    if skip is not None:
        y = y + jnp.broadcast_to(skip[:, None], v.shape).astype(y.dtype) * v.astype(y.dtype)
    return y.astype(v.dtype)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _fft_conv(
    method: LongConvMethod,
    v: Float[Array, "batch features time"],
    h: Float[Array, "features time"],
) -> Float[Array, "batch features time"]:
    (y,) = _by_method(method, _convolve, v, h[None])
    return y


fft_conv = jax.jit(_fft_conv, static_argnums=0)
"""The convolution without `skip` and casts, in float32 or float64."""


@_fft_conv.defjvp
def _fft_conv_jvp(method: LongConvMethod, primals, tangents):
    y = _fft_conv(method, *primals)
    return y, linear_map(_tangent, _gradient, primals, tangents, method)


def _tangent(method: LongConvMethod, residuals, tangents):
    """`v ∗ dh + dv ∗ h`."""
    (v, h), (d_v, d_h) = residuals, tangents
    (d_y,) = _by_method(method, _convolve_each, v, h[None], d_v, d_h[None])
    return d_y


def _gradient(method: LongConvMethod, residuals, cotangent):
    """The transpose of `_tangent`, which consists of correlations."""
    v, h = residuals
    v_gradient, h_gradient = _by_method(method, _correlate, v, h[None], cotangent)
    return v_gradient, h_gradient[0]


Signals = tuple[Float[Array, "_ features time"], ...]
Spectra = tuple[Complex[Array, "_ features frequencies"], ...]


def _convolve(v: Complex[Array, "..."], h: Complex[Array, "..."]) -> Spectra:
    return (v * h,)


def _convolve_each(v, h, d_v, d_h) -> Spectra:
    return (v * d_h + d_v * h,)


def _correlate(v, h, cotangent) -> Spectra:
    """Correlates the cotangent with the filter, and with the inputs of all rows."""
    return cotangent * h.conj(), jnp.sum(cotangent * v.conj(), axis=0, keepdims=True)


def _by_method(method: LongConvMethod, product: Callable[..., Spectra], *signals) -> Signals:
    """Applies `product` to the spectra of the signals, and transforms the results back."""
    rfft, twisted = partial(_rfft, product), partial(_twisted, product)
    if method == "auto":
        return jax.lax.platform_dependent(*signals, cpu=twisted, default=rfft)
    return (rfft if method == "rfft" else twisted)(*signals)


def _fast_length(length: int, *, real: bool) -> int:
    fast: Any = scipy.fft.next_fast_len(max(length, 1), real)
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
