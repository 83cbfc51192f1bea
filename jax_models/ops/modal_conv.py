"""The causal convolution with a sum of complex exponentials, whose state has a fixed size."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim
from jaxtyping import Array, Complex, Float

from jax_models.checks.arguments import checked
from jax_models.ops.affine import common_carry_dtype, einsum
from jax_models.ops.by_platform import by_platform
from jax_models.ops.linear_recurrence import linear_recurrence
from jax_models.ops.rows import DividedMasks, Rows, given_rows
from jax_models.ops.shard_map_axes import match_varying_axes
from jax_models.ops.time_axis import from_device_before

CHUNK = 32
"""The steps of a chunk. Longer chunks need more products, and shorter ones need more states."""
MANY_STATES = 2**20
"""A number of complex numbers. On a CPU, it is faster to store fewer than these for the backward
pass than to use chunks.
"""


class ModalConvState(NamedTuple):
    """The state of a modal convolution: the real and imaginary part of each mode."""

    modes: Float[Array, "batch features modes 2"]


@checked()
def modal_conv(
    v: Float[Array, "batch time features"],
    state: ModalConvState,
    *,
    poles: Float[Array, "features modes 2"],
    residues: Float[Array, "features modes 2"],
    skip: Float[Array, " features"],
    **masks: Unpack[DividedMasks],
) -> tuple[Float[Array, "batch time features"], ModalConvState]:
    """`y_t = Σ_{i ≤ t} h_{t−i} v_i + skip ⊙ v_t` with `h_t = Re Σ_n R_n λ_n^t`, as a recurrence.

        s_t = λ ⊙ s_{t−1} + v_t
        y_t = Re Σ_n R_n s_{t,n} + skip ⊙ v_t

    λ are the poles and R the residues, n for each feature. Complex numbers are stored as pairs of
    real numbers along the last axis. The computation is in at least float32, and y has the dtype of
    v.

    On a CPU, the steps run one after the other. Time is divided into chunks of 32 steps on other
    devices, with a `time_axis`, and under differentiation if the states of all steps would take
    much memory. If the number of steps is symbolic, a chunk is one step. A product with the taps
    computes what a chunk contributes to its own outputs, and `linear_recurrence` computes the
    states between chunks, so the states take 2n/32 of the memory of v. A NaN reaches all steps of
    its chunk. With `reset`, a chunk is one step, and the states take 2n times the memory of v.

    Args:
        v: the inputs.
        state: the modes before the first step.
        poles: |λ| ≤ 1 for a filter that does not grow.
        residues: the weights of the modes.
        skip: the factor by which the current input is multiplied and added to the output.
        **masks: `lengths`, `reset` and `time_axis`, as in `DividedMasks`. With a time axis, the
            size of a chunk is the largest power of two, up to 32, that divides the number of steps
            of a device.

    Raises:
        NotImplementedError: `lengths` are given with a `time_axis`.
        TypeError: an array is not floating.
        ValueError: the shapes do not fit each other, or a length lies outside 0 … time.

    """
    rows = given_rows(masks)
    dtype = common_carry_dtype(v, poles, residues)
    poles, residues, start = (
        lax.complex(x[..., 0], x[..., 1])
        for x in (array.astype(dtype) for array in (poles, residues, state.modes))
    )
    u, skip = rows.masked(v.astype(dtype)), skip.astype(dtype)
    if rows.time_axis is not None or any(map(is_symbolic_dim, v.shape)):
        y, last = _chunked(u, start, poles, residues, skip, rows)
    else:
        y, last = _modal_conv(*match_varying_axes((u, start, poles, residues, skip, rows)))
    return y.astype(v.dtype), ModalConvState(_real_and_imag(last))


@jax.custom_jvp
def _modal_conv(u, start, poles, residues, skip, rows: Rows) -> Any:
    """Returns the outputs and the last state."""
    return by_platform(u, start, poles, residues, skip, rows, cpu=_sequential, default=_chunked)


@_modal_conv.defjvp
def _modal_conv_jvp(primals, tangents):
    u, _, poles, _, _, rows = primals
    few = u.shape[0] * u.shape[1] * poles.size < MANY_STATES
    run: Callable[..., Any] = _fastest_derivative if few else _chunked
    return jax.jvp(lambda *arrays: run(*arrays, rows), primals[:5], tangents[:5])


@jax.jit  # otherwise the default device would decide
def _fastest_derivative(*args):
    """Replaces `by_platform`, whose derivative would run the forward pass twice."""
    return lax.platform_dependent(*args, cpu=_sequential, default=_chunked)


@jax.jit  # otherwise an eager call would compile the scan each time
def _sequential(u, start, poles, residues, skip, rows: Rows):
    """Runs one step after the other. The features come last, so that steps use whole vectors."""
    poles, residues, start = (jnp.moveaxis(z, -1, 0) for z in (poles[None], residues[None], start))

    def step(s, now):
        u, (active, restart) = now
        if restart is not None:
            s = jnp.where(restart[None, :, None], jnp.zeros_like(s), s)
        new = poles * s + u[None].astype(s.dtype)
        y = jnp.sum((residues * new).real, axis=0) + skip[None] * u
        return (new if active is None else jnp.where(active[None, :, None], new, s)), y

    by_time = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (u, (rows.active, rows.reset)))
    last, y = lax.scan(step, start, by_time)
    return jnp.swapaxes(y, 0, 1), jnp.moveaxis(last, 0, -1)


def _chunked(u, start, poles, residues, skip, rows: Rows):
    """Computes products within chunks, and a recurrence between them."""
    batch, time, features = u.shape
    # A chunk is one step if documents may begin anywhere or the number of steps is symbolic. If
    # time is divided over devices, each device must have whole chunks.
    if rows.reset is not None or is_symbolic_dim(u.shape[1]):
        size = 1
    else:
        size = max(min(time, CHUNK), 1) if rows.time_axis is None else math.gcd(time, CHUNK)
    full, count = time // size, -(-time // size)
    padding = 0 if size == 1 else count * size - time
    chunks = jnp.pad(u, ((0, 0), (0, padding), (0, 0))).reshape(batch, count, size, features)
    powers = _powers(poles, size)

    # The contribution of a chunk's inputs to its own outputs is a product with a Toeplitz matrix of
    # taps.
    taps = jnp.sum(residues[None] * powers[:-1], axis=-1).real
    age = jnp.arange(size)[None] - jnp.arange(size)[:, None]
    own = jnp.where((age >= 0)[..., None], taps[jnp.maximum(age, 0)], 0)
    y = einsum("bkid,ijd->bkjd", chunks, own)

    # The states at the ends of whole chunks are a linear recurrence with the powers of the poles.
    given = einsum("bkid,idnc->bkdnc", chunks[:, :full], _real_and_imag(powers[size - 1 :: -1]))
    of_chunks = None if rows.lengths is None else rows.lengths // size
    ends, last = linear_recurrence(
        _repeat_poles(powers[size], batch, full),
        lax.complex(given[..., 0], given[..., 1]).reshape(batch, full, poles.size),
        start.reshape(batch, poles.size),
        rows=Rows.of(full, of_chunks, rows.reset, rows.time_axis),
    )
    # Add the contribution of the state before each chunk to its outputs.
    first = start.reshape(batch, 1, poles.size)
    if rows.time_axis is not None:
        first = from_device_before(ends[:, -1:], first, rows.time_axis)
    before = jnp.concatenate([first, ends], axis=1)[:, :count]
    if rows.reset is not None:
        before = jnp.where(rows.reset[..., None], 0, before)
    before = _real_and_imag(before.reshape(batch, count, *poles.shape))
    y = y + einsum("bkdnc,jdnc->bkjd", before, _real_and_imag((residues[None] * powers[1:]).conj()))

    # A row may end inside a chunk, so run the steps of its last chunk from the state before them.
    if size > 1 and (rows.lengths is not None or full < count):
        steps = jnp.full(batch, time, jnp.int32) if rows.lengths is None else rows.lengths
        at = jnp.minimum(steps // size, count - 1)[:, None, None, None]
        rest = jnp.take_along_axis(chunks, at, axis=1)[:, 0, :, :, None]
        _, last = linear_recurrence(
            _repeat_poles(poles, batch, size),
            jnp.broadcast_to(rest, (batch, size, *poles.shape)).reshape(batch, size, poles.size),
            last,
            rows=Rows.of(size, steps % size),
        )
    y = y.reshape(batch, count * size, features)[:, :time]
    y = y + jnp.broadcast_to(skip, y.shape) * u
    return y, last.reshape(batch, *poles.shape)


def _powers(
    poles: Complex[Array, "features modes"], count: int
) -> Complex[Array, "count+1 features modes"]:
    """`λ⁰ … λ^count`, computed by products because a pole may be 0."""
    factors = jnp.broadcast_to(poles, (count, *poles.shape))
    return jnp.cumprod(jnp.concatenate([jnp.ones_like(poles)[None], factors]), axis=0)


def _repeat_poles(poles: Complex[Array, "features modes"], batch: int, steps: int) -> Array:
    """Repeats the factors for each step of a `linear_recurrence`."""
    return jnp.broadcast_to(poles.reshape(-1), (batch, steps, poles.size))


def _real_and_imag(z: Complex[Array, "..."]) -> Float[Array, "... 2"]:
    return jnp.stack([z.real, z.imag], axis=-1)
