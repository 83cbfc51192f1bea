"""A long convolution that continues step by step, each step in O(log² length) on average.

The algorithm is that of Fu et al., "Flash Inference" (arXiv 2410.12982), which divides the
convolution into tiles of doubling size. When the number of inputs so far is an odd multiple of
U = 2^k, one FFT of length 2U computes the contribution of the last U inputs to the next U outputs.
In this way, each pair of an input and a later output is counted exactly once. Pairs inside a block
of `BLOCK` steps are summed directly.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_models.checks.arguments import checked
from jax_models.checks.values import FloatingDtype, checked_count, checked_size, wrong_shape
from jax_models.ops.affine import carry_dtype
from jax_models.ops.conv import convolve, with_skip
from jax_models.ops.rows import Rows
from jax_models.ops.shard_map_axes import match_varying_axes

BLOCK = 16
"""The number of steps below which a direct sum is faster than an FFT."""

Taps = Callable[[Any, int], Float[Array, "features length"]]
"""A hashable function `taps(params, length)` that returns the first `length` taps of a filter."""


class LongConvState(NamedTuple):
    """The state of a convolution of at most `length` steps.

    The whole state is a function of the inputs so far. In `tiles`, the tile of U inputs is stored
    in U rows from row U − BLOCK on, until the next tile of its size replaces it.
    """

    position: Int[Array, " batch"]
    """Number of inputs so far."""
    block: Float[Array, "batch block features"]
    """The inputs of the block that is not yet full."""
    ahead: Float[Array, "batch block features"]
    """The contribution of the inputs before the block to its outputs."""
    inputs: Float[Array, "batch length features"]
    """The inputs before the block."""
    tiles: Float[Array, "batch tiles features"]
    """The contribution of the last tile of each size to the outputs after it."""


@checked({int: checked_count})
def empty_long_conv_state(
    batch_size: int, features: int, max_length: int, dtype: FloatingDtype = jnp.float32
) -> LongConvState:
    """The state before the first input, in `dtype`."""
    max_length = checked_size("max_length", max_length)

    def zeros(steps: int) -> Float[Array, "batch steps features"]:
        return jnp.zeros((batch_size, steps, features), dtype)

    return LongConvState(
        jnp.zeros(batch_size, jnp.int32),
        zeros(BLOCK),
        zeros(BLOCK),
        zeros(_buffer(max_length)),
        zeros(sum(_tile_sizes(max_length))),
    )


def _buffer(max_length: int) -> int:
    """The size of the buffer of inputs: max_length, rounded up to whole blocks."""
    return -(-max_length // BLOCK) * BLOCK


@checked({int: checked_size})
@partial(jax.jit, static_argnames=("taps", "max_length"))
def long_conv_state(
    v: Float[Array, "batch features time"],
    *,
    taps: Taps,
    params: Any,
    max_length: int,
    lengths: Int[Array, " batch"] | None = None,
) -> LongConvState:
    """Computes the state after the first inputs of a sequence, whose outputs `long_conv` computes.

    The arguments and errors are those of `online_conv`.
    """
    history = _history(v, lengths, max_length)
    history = jnp.pad(history, ((0, 0), (0, _buffer(max_length) - v.shape[2]), (0, 0)))
    start = jnp.zeros(v.shape[0], jnp.int32)
    return _state(taps, max_length, params, history, _end(start, v, lengths))


@checked({int: checked_size})
@partial(jax.jit, static_argnames=("taps", "max_length"))
def online_conv(
    v: Float[Array, "batch features time"],
    state: LongConvState,
    *,
    taps: Taps,
    params: Any,
    max_length: int,
    skip: Float[Array, " features"] | None = None,
    lengths: Int[Array, " batch"] | None = None,
) -> tuple[Float[Array, "batch features time"], LongConvState]:
    """`y_t = Σ_{s ≤ t} h_{t−s} v_s + skip ⊙ v_t` over the inputs of the state and of v.

    One step (time = 1) costs O(log² max_length) on average; more steps cost an FFT over max_length.
    Outputs from step max_length on are NaN.

    Args:
        v: the inputs; time is the last axis.
        state: the state after the inputs before v.
        taps: `taps(params, n)` gives the filter's first n taps. A step computes only as many as
            it needs.
        params: the filter's parameters.
        max_length: the largest number of inputs.
        skip: as in `long_conv`.
        lengths: the number of steps of each row before its padding. The padding does not change the
            state.

    Raises:
        TypeError: the dtype of an array is of another kind.
        ValueError: a shape is wrong, including that of the taps, a length lies outside 0 … time, v
            has more than max_length steps, or the state has other sizes.

    """
    inputs = _history(v, lengths, max_length)
    dtype, time = inputs.dtype, v.shape[2]
    sizes = (v.shape[0], v.shape[1], max_length)
    expected = jax.eval_shape(lambda: empty_long_conv_state(*sizes, dtype))
    shapes = [[s.shape for s in each] for each in (state, expected)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"state: expected the shapes {shapes[1]}, got {shapes[0]}")
    state = LongConvState(state.position, *(s.astype(dtype) for s in state[1:]))
    if time == 1 and lengths is None:
        y, last_state = _step(taps, max_length, params, state, inputs[:, 0])
        return with_skip(y[..., None], v, skip), last_state

    start = state.position
    history = _put(state.inputs, start - start % BLOCK, state.block)
    history = _put(history, start, inputs)
    past = jnp.swapaxes(history, 1, 2)[..., :max_length]
    y = convolve("auto", past, _first_taps(taps, params, max_length, past))
    y = jnp.swapaxes(y, 1, 2)
    y = jnp.swapaxes(_take(y, start, time, fill_value=jnp.nan), 1, 2)
    last_state = _state(taps, max_length, params, history, _end(start, v, lengths))
    return with_skip(y, v, skip), last_state


def _history(v, lengths, max_length: int) -> Float[Array, "batch time features"]:
    """Returns the inputs as (batch, time, features), in at least float32, with zero padding."""
    dtype = carry_dtype(v.dtype)
    if v.shape[-1] > max_length:
        raise ValueError(
            f"v: expected shape (batch, features, time ≤ max_length={max_length}), got {v.shape}"
        )
    return Rows.of(v.shape[2], lengths).masked(jnp.swapaxes(v, 1, 2).astype(dtype))


def _end(start, v, lengths) -> Int[Array, " batch"]:
    """The position after v."""
    return start + (v.shape[2] if lengths is None else lengths.astype(start.dtype))


def _first_taps(taps: Taps, params, length: int, like: Float[Array, "batch features *time"]):
    """Computes the first taps in the dtype of the inputs `like`, and checks their shape."""
    h = taps(params, length)
    if h.shape != (like.shape[1], length):
        raise wrong_shape("taps(params, length)", (like.shape[1], length), h.shape)
    return h.astype(like.dtype)


def _tile_sizes(max_length: int) -> list[int]:
    sizes = [BLOCK]
    while sizes[-1] < max_length:
        sizes.append(2 * sizes[-1])
    return sizes[:-1]


def _take(rows, start, count: int, fill_value: float = 0):
    """Takes the rows start … start + count − 1 of each batch row, and fills missing ones."""
    index = start[:, None] + jnp.arange(count, dtype=start.dtype)[None]
    index = jnp.where(index < 0, rows.shape[1], index)
    batch = jnp.arange(start.shape[0], dtype=start.dtype)[:, None]
    return rows.at[batch, index].get(mode="fill", fill_value=fill_value)


def _put(rows, start, values):
    """Adds `values` to the rows from `start` on, and drops values that do not fit."""
    index = start[:, None] + jnp.arange(values.shape[1], dtype=start.dtype)[None]
    batch = jnp.arange(start.shape[0], dtype=start.dtype)[:, None]
    return rows.at[batch, index].add(values, mode="drop")


def _tile(taps: Taps, max_length: int, params, inputs: Float[Array, "batch size features"]):
    """The contribution of U inputs to the U outputs after them."""
    size = inputs.shape[1]
    v = jnp.swapaxes(inputs, 1, 2)
    h = _first_taps(taps, params, min(2 * size, max_length), v)
    spectrum = jnp.fft.rfft(v, 2 * size) * jnp.fft.rfft(h, 2 * size)[None]
    return jnp.swapaxes(jnp.fft.irfft(spectrum, 2 * size)[..., size:], 1, 2)


def _ahead(max_length: int, tiles, start):
    """The contribution of the tiles to the block that starts at `start`."""
    ahead = jnp.zeros((start.shape[0], BLOCK, tiles.shape[2]), tiles.dtype)
    for size in _tile_sizes(max_length):
        rows = _take(tiles, size - BLOCK + start % size, BLOCK)
        ahead = ahead + jnp.where((start // size % 2 == 1)[:, None, None], rows, 0)
    return ahead


def _state(taps: Taps, max_length: int, params, history, end) -> LongConvState:
    """Computes the state after the inputs before `end` of a history that is zero from `end` on."""
    start = end - end % BLOCK
    before = jnp.arange(history.shape[1], dtype=start.dtype)[None] < start[:, None]
    tiles = [jnp.zeros((end.shape[0], 0, history.shape[2]), history.dtype)]
    for size in _tile_sizes(max_length):
        count = end // size
        last = (count - 1 + count % 2) * size  # the last odd multiple of the size
        tile = _tile(taps, max_length, params, _take(history, last - size, size))
        tiles.append(jnp.where((count > 0)[:, None, None], tile, 0))
    tiles = jnp.concatenate(tiles, axis=1)
    return LongConvState(
        end,
        _take(history, start, BLOCK),
        _ahead(max_length, tiles, start),
        jnp.where(before[..., None], history, 0),
        tiles,
    )


def _step(
    taps: Taps, max_length: int, params, state: LongConvState, v: Float[Array, "batch features"]
) -> tuple[Float[Array, "batch features"], LongConvState]:
    """Returns the output of one step, and the state after it."""
    offset = state.position % BLOCK
    lag = offset[:, None] - jnp.arange(BLOCK, dtype=offset.dtype)[None]
    block = jnp.where((lag == 0)[..., None], v[:, None], state.block)
    h = _first_taps(taps, params, min(BLOCK, max_length), v).T
    h = h.at[jnp.where(lag < 0, BLOCK, lag)].get(mode="fill", fill_value=0)
    y = jnp.sum(h * block, axis=1) + _take(state.ahead, offset, 1)[:, 0]
    y = jnp.where((state.position < max_length)[:, None], y, jnp.nan)
    advanced: Any = _advance(
        taps, max_length, *match_varying_axes((params, state._replace(block=block)))
    )
    return y, advanced


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _advance(taps: Taps, max_length: int, params, state: LongConvState) -> LongConvState:
    """Returns the state after the step whose input is already in the block.

    The buffers are updated in place, and only when a block ends. XLA would copy a whole buffer at
    each step if a conditional returned the buffer, or if the step read it outside of the loop that
    writes it. The code therefore uses loops that run zero times or once.
    """
    end = state.position + 1
    done = end % BLOCK == 0

    def end_block(turn, buffers):
        ahead, inputs, tiles = buffers
        here = end + turn  # `turn` is 0, and keeps XLA from moving this code out of the loop
        outside = inputs.shape[1]
        inputs = _put(inputs, jnp.where(done, here - BLOCK, outside), state.block)
        for size in _tile_sizes(max_length):
            needed = done & (here % (2 * size) == size)
            write = partial(_write_tile, taps, max_length, params, size, here, needed)
            turns = jnp.any(needed).astype(jnp.int32)
            inputs, tiles = jax.lax.fori_loop(0, turns, write, (inputs, tiles))
        new_ahead = _ahead(max_length, tiles, here)
        return jnp.where(done[:, None, None], new_ahead, ahead), inputs, tiles

    buffers = (state.ahead, state.inputs, state.tiles)
    buffers = jax.lax.fori_loop(0, jnp.any(done).astype(jnp.int32), end_block, buffers)
    block = jnp.where(done[:, None, None], 0, state.block)
    return LongConvState(end, block, *buffers)


def _write_tile(taps, max_length, params, size, end, needed: Bool[Array, " batch"], turn, buffers):
    inputs, tiles = buffers
    zeros = jnp.zeros((end.shape[0], size, inputs.shape[2]), inputs.dtype)
    zeros, _ = match_varying_axes((zeros, inputs))
    tile = jax.lax.cond(
        turn == 0,
        lambda: _tile(taps, max_length, params, _take(inputs, end - size, size)),
        lambda: zeros,
    )
    old = jax.lax.slice_in_dim(tiles, size - BLOCK, 2 * size - BLOCK, axis=1)
    new = jnp.where(needed[:, None, None], tile, old)
    return inputs, jax.lax.dynamic_update_slice_in_dim(tiles, new, size - BLOCK, axis=1)


@_advance.defjvp
def _advance_jvp(taps: Taps, max_length: int, primals, tangents):
    """Differentiates the state as a function of all inputs, which determine `ahead` and `tiles`."""
    params, state = primals
    d_params, d_state = tangents

    def advance(params, block, inputs):
        start = state.position - state.position % BLOCK
        return _state(taps, max_length, params, _put(inputs, start, block), state.position + 1)

    _, tangent = jax.jvp(
        advance,
        (params, state.block, state.inputs),
        (d_params, d_state.block, d_state.inputs),
    )
    return _advance(taps, max_length, params, state), tangent
