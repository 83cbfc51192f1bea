"""The modal convolution in chunks of time."""

import math

import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim
from jaxtyping import Array, Complex

from jax_models.ops.affine import einsum
from jax_models.ops.forms import known_size
from jax_models.ops.linear import linear_recurrence
from jax_models.ops.linear.modal_conv.definition import ModalConv, Results
from jax_models.ops.rows import Rows
from jax_models.ops.time_axis import from_device_before

CHUNK = 32
"""The steps of a chunk. Longer chunks need more products, and shorter ones need more states."""
MANY_STATES = 2**20
"""A number of complex numbers. On a CPU, it is faster to store fewer than these for the backward
pass than to use chunks.
"""


def run(call: ModalConv) -> Results:
    """Computes products within chunks, and a recurrence between them."""
    u, start, poles, residues, rows = call.u, call.start, call.poles, call.residues, call.rows
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
    given = einsum("bkid,idnc->bkdnc", chunks[:, :full], real_and_imag(powers[size - 1 :: -1]))
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
    before = real_and_imag(before.reshape(batch, count, *poles.shape))
    y = y + einsum("bkdnc,jdnc->bkjd", before, real_and_imag((residues[None] * powers[1:]).conj()))

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
    y = y + jnp.broadcast_to(call.skip, y.shape) * u
    return y, last.reshape(batch, *poles.shape)


def pays(call: ModalConv, platform: str, differentiated: bool) -> bool:
    """On a CPU, chunks pay if the backward pass would have to store many states.

    With a `time_axis`, they are the only form.
    """
    if platform != "cpu" or call.rows.time_axis is not None:
        return True
    batch, time, _ = call.u.shape
    return differentiated and known_size(batch, time, *call.poles.shape) >= MANY_STATES


def _powers(
    poles: Complex[Array, "features modes"], count: int
) -> Complex[Array, "count+1 features modes"]:
    """`λ⁰ … λ^count`, computed by products because a pole may be 0.

    Each product doubles the number of powers. `jnp.cumprod` takes longer to compile.
    """
    powers, next_power = jnp.ones_like(poles[None]), poles[None]
    while len(powers) <= count:
        more = powers[: count + 1 - len(powers)] * next_power
        powers, next_power = jnp.concatenate([powers, more]), next_power * next_power
    return powers


def _repeat_poles(poles: Complex[Array, "features modes"], batch: int, steps: int) -> Array:
    """Repeats the factors for each step of a `linear_recurrence`."""
    return jnp.broadcast_to(poles.reshape(-1), (batch, steps, poles.size))


def real_and_imag(z: Complex[Array, "..."]) -> Array:
    """Stores complex numbers as pairs of real ones."""
    return jnp.stack([z.real, z.imag], axis=-1)
