"""The causal convolution with a filter as long as the sequence."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_models.ops.affine import floating_carry_dtype


def long_conv(
    v: Float[Array, "batch features time"],
    h: Float[Array, "features time"],
    skip: Float[Array, " features"] | None = None,
) -> Float[Array, "batch features time"]:
    """`y_t = Σ_{s ≤ t} h_{t−s} v_s + skip ⊙ v_t`, in O(T log T) by FFT at 2T.

    Time is the last axis. Computed in at least float32, whatever v and h are in (there is no FFT in
    bfloat16); y has the dtype of v. Lengths that are no products of small primes are transformed at
    the next length that is.

    Raises:
        TypeError: v, h or skip is not floating.
        ValueError: the shapes do not fit each other.

    """
    dtype = floating_carry_dtype(v=v, h=h)
    if v.ndim != 3 or h.shape != v.shape[1:]:
        raise ValueError(
            f"h: expected shape (features, time) of v (batch, features, time), "
            f"got {h.shape} for {v.shape}"
        )
    if skip is not None:
        floating_carry_dtype(skip=skip)
        if skip.shape != h.shape[:1]:
            raise ValueError(f"skip: expected shape {h.shape[:1]}, got {skip.shape}")
    return with_skip(fft_conv(v.astype(dtype), h.astype(dtype)), v, skip)


def with_skip(y, v, skip) -> Float[Array, "batch features time"]:
    """`y + skip ⊙ v`, in the dtype of v."""
    if skip is not None:
        y = y + jnp.broadcast_to(skip[:, None], v.shape).astype(y.dtype) * v.astype(y.dtype)
    return y.astype(v.dtype)


@jax.custom_vjp
def fft_conv(
    v: Float[Array, "batch features time"], h: Float[Array, "features time"]
) -> Float[Array, "batch features time"]:
    """The convolution alone, of float32 or float64."""
    return _forward(v, h)[0]


def _forward(v, h):
    n = 2 * v.shape[-1]
    product = jnp.fft.rfft(v, n) * jnp.fft.rfft(h, n)[None]
    return jnp.fft.irfft(product, n)[..., : v.shape[-1]], (v, h)


def _backward(residuals, g):
    """The correlations of the cotangent with the filter, and with the inputs of all rows."""
    v, h = residuals
    time = v.shape[-1]
    n = 2 * time
    g = jnp.fft.rfft(g, n)
    v_gradient = jnp.fft.irfft(g * jnp.fft.rfft(h, n).conj()[None], n)
    h_gradient = jnp.fft.irfft(jnp.sum(g * jnp.fft.rfft(v, n).conj(), axis=0), n)
    return v_gradient[..., :time], h_gradient[..., :time]


fft_conv.defvjp(_forward, _backward)
