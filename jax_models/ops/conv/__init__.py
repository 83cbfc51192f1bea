"""The causal convolution with a filter as long as the sequence."""

from functools import partial
from typing import Annotated

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array, Float

from jax_models.checks.arguments import checked
from jax_models.ops.affine import common_carry_dtype
from jax_models.ops.conv import definition, fft
from jax_models.ops.conv.definition import LongConv
from jax_models.ops.forms import Form, Operator
from jax_models.ops.shard_map_axes import match_varying_axes

LONG_CONV = Operator(
    "long_conv",
    (
        Form("twisted", fft.run_twisted, ("cpu",)),
        Form("rfft", fft.run_rfft),
        Form("definition", definition.run),
    ),
)

LongConvMethod = Annotated[str, "auto or the name of a form"]
"""What runs a long convolution."""


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
        method: the form that runs. "rfft" multiplies the spectra of v and h at length 2T, for all
            features at once. "twisted" multiplies v and h by e^{iπt/2T} and uses complex transforms
            of length T, because the terms that a circular convolution wraps around then become
            imaginary. It transforms parts of the features in parallel or, if there are many short
            rows, in a loop. "definition" is the sum itself, in O(T²). "auto" is "twisted" on a CPU,
            and "rfft" elsewhere.
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
    y = convolve(method, part, h.astype(dtype))
    return with_skip(exchange(y, split_axis=2, concat_axis=1) if exchange else y, v, skip)


def convolve(
    method: str, v: Float[Array, "batch features time"], h: Float[Array, "features time"]
) -> Float[Array, "batch features time"]:
    """The convolution without `skip` and casts, in float32 or float64."""
    return LONG_CONV(match_varying_axes(LongConv(v, h)), method)


def with_skip(y, v, skip) -> Float[Array, "batch features time"]:
    """`y + skip ⊙ v`, in the dtype of v."""
    if skip is not None:
        y = y + jnp.broadcast_to(skip[:, None], v.shape).astype(y.dtype) * v.astype(y.dtype)
    return y.astype(v.dtype)
