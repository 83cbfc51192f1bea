"""Prompts of several lengths in one batch, and the text that continues them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int

from jax_models.models.language_model import checked_tokens

Prompt = Int[Array, "batch time"] | Int[np.ndarray, "batch time"]
Lengths = Int[Array, " batch"] | Int[np.ndarray, " batch"]


def checked_prompts(prompt, mask, vocab_size: int, limit: int) -> tuple[Prompt, Lengths]:
    """Returns the last `limit` tokens of each row, starting in column 0, and the rows' lengths.

    The arrays are int32, on the host unless they are traced. The tokens of a row whose traced mask
    is wrong are outside the vocabulary.
    """
    try:
        tokens = prompt if isinstance(prompt, Tracer) else np.asarray(prompt)
    except ValueError:
        raise ValueError(
            "prompt: expected rows of one length, got ragged ones; pad the shorter rows on the "
            "left, and give a mask"
        ) from None
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(f"prompt: expected shape (batch ≥ 1, time ≥ 1), got {tokens.shape}")
    batch_size, time = tokens.shape
    limit = min(limit, time)
    if mask is None:
        tokens = _integers(tokens[:, -limit:], vocab_size)
        return tokens, np.full(batch_size, tokens.shape[1], np.int32)

    # Find where each row begins and ends, and check that no padding lies between.
    mask = _checked_mask(mask, tokens.shape)
    on_host = isinstance(mask, np.ndarray) and isinstance(tokens, np.ndarray)
    numpy: Any = np if on_host else jnp
    lengths = mask.sum(axis=1, dtype=np.int32)
    start = mask.argmax(axis=1).astype(np.int32)
    end = time - mask[:, ::-1].argmax(axis=1).astype(np.int32)
    is_right = (lengths > 0) & (end - start == lengths)
    if isinstance(mask, np.ndarray) and not is_right.all():
        raise ValueError(
            "mask: expected at least one real token in each row and no padding between them, got "
            f"{mask[~is_right][0].astype(int).tolist()} in row {is_right.argmin()}"
        )
    # Move each row to the left, so that the model sees no padding before it.
    tokens = _integers(numpy.where(mask, tokens, numpy.zeros_like(tokens)), vocab_size)
    if not on_host:
        tokens = jnp.where(is_right[:, None], tokens, vocab_size)
    longest = int(lengths.max()) if isinstance(lengths, np.ndarray) else time
    steps = np.arange(min(longest, limit), dtype=np.int32)[None]
    first = numpy.where(is_right, numpy.maximum(end - limit, start), 0)
    columns = numpy.minimum(first[:, None] + steps, time - 1)
    tokens = numpy.take_along_axis(tokens, columns, axis=1)
    return tokens, numpy.where(is_right, numpy.minimum(lengths, limit), len(steps[0]))


def last_window(prompt: Prompt, lengths: Lengths, drawn: Any, limit: int) -> tuple[Array, Array]:
    """The last `limit` tokens of each text, starting in column 0, and their number.

    `drawn` (steps, batch) continues the prompts. The text of at least one row is that long.
    """
    numpy: Any = np if isinstance(prompt, np.ndarray) and isinstance(drawn, np.ndarray) else jnp
    time, count = prompt.shape[1], len(drawn)
    ends = lengths + np.int32(count)
    steps = numpy.maximum(ends - limit, 0)[:, None] + np.arange(limit, dtype=np.int32)[None]
    columns = numpy.where(steps < lengths[:, None], steps, time + steps - lengths[:, None])
    columns = numpy.minimum(columns, time + count - 1)
    window = numpy.take_along_axis(numpy.concatenate([prompt, drawn.T], axis=1), columns, axis=1)
    return jax.device_put((window, numpy.minimum(ends, limit)), may_alias=False)


def _integers(tokens, vocab_size: int) -> Prompt:
    checked = checked_tokens("prompt", tokens, vocab_size)
    return (checked if isinstance(tokens, jax.Array) else tokens).astype(np.int32)


def _checked_mask(mask, shape: tuple[int, ...]) -> Any:
    """Returns a mask of the prompt's shape as booleans, or raises an error."""
    is_traced = isinstance(mask, Tracer)
    try:
        values = mask if is_traced else np.asarray(mask)
    except ValueError:
        raise ValueError("mask: expected rows of one length, got ragged ones") from None
    if values.dtype != bool and not jnp.issubdtype(values.dtype, jnp.integer):
        raise TypeError(f"mask: expected booleans, or integers 0 and 1, got {values.dtype}")
    if values.shape != shape:
        raise ValueError(f"mask: expected the shape of the prompt, {shape}, got {values.shape}")
    if not is_traced and values.dtype != bool and not np.isin(values, (0, 1)).all():
        raise ValueError(f"mask: expected 0 and 1, got {np.unique(values).tolist()[:10]}")
    return values.astype(bool)
