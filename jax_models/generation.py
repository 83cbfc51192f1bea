"""Text from a language model, token by token from its carried state."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Key

from jax_models.language_model import LanguageModel, LanguageModelState, checked_tokens
from jax_models.ops import carry_dtype


def sample(
    logits: Float[Array, "batch vocab"],
    key: Key[Array, ""],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> Int[Array, " batch"]:
    """Draw tokens from softmax(logits / temperature), over the `top_k` likeliest if given.

    A temperature of 0 is greedy: the likeliest token. Drawn in at least float32.
    """
    logits = logits.astype(carry_dtype(logits.dtype))
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    if temperature == 0:
        return jnp.argmax(logits, axis=-1)
    if top_k is not None:
        kth = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < kth, -jnp.inf, logits)
    return jax.random.categorical(key, logits / temperature)


def stream(
    model: LanguageModel,
    prompt: Int[ArrayLike, "batch time"],
    num_tokens: int,
    *,
    key: Key[Array, ""],
    temperature: float = 1.0,
    top_k: int | None = None,
) -> Iterator[Int[Array, " batch"]]:
    """Continue a prompt, yielding the tokens (batch,) of one step after the other.

    The prompt runs once; then each token costs one `step` from the carried state, however long the
    text. Where the model has a `context_length` and the text has filled it, each token is drawn
    from the last `context_length` tokens alone, by a run over all of them.

    Args:
        model: dropout, if it has any, is off.
        prompt: at least one token a row.
        num_tokens: how many to draw.
        key: the randomness; the same key gives the same text.
        temperature: flattens (> 1) or sharpens (< 1) the distribution; 0 is greedy.
        top_k: draw from the k likeliest tokens only.

    Raises:
        ValueError: the prompt is empty or of the wrong rank, or an option is out of range.

    """
    prompt = checked_tokens("prompt", prompt, model.config.vocab_size)
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise ValueError(f"prompt: expected shape (batch, time ≥ 1), got {prompt.shape}")
    if num_tokens < 1:
        raise ValueError(f"num_tokens: expected at least 1, got {num_tokens}")
    if not temperature >= 0:
        raise ValueError(f"temperature: expected at least 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: expected at least 1, got {top_k}")
    return _stream(model, prompt, num_tokens, key, temperature, top_k)


def _stream(model, prompt, num_tokens, key, temperature, top_k):
    evaluating = nnx.view(model, deterministic=True, raise_if_not_found=False)
    graphdef, params = nnx.split(evaluating)
    advance = partial(_advance, graphdef, params, temperature=temperature, top_k=top_k)
    slide = partial(_slide, graphdef, params, temperature=temperature, top_k=top_k)
    keys = jax.random.split(key, num_tokens)
    limit = model.config.context_length
    if limit is None:
        yield from _from_state(advance, prompt, keys)
        return
    window = prompt[:, -limit:]
    room = limit - window.shape[1] + 1
    text = [window]
    for token in _from_state(advance, window, keys[:room]):
        yield token
        text.append(token[:, None])
    if room < num_tokens:
        window = jnp.asarray(np.concatenate(text, axis=1)[:, -limit:])
    for step_key in keys[room:]:
        token, window = slide(window, step_key)
        yield token


def _from_state(advance, tokens, keys):
    state = None
    for step_key in keys:
        token, state = advance(tokens, state, step_key)
        yield token
        tokens = token[:, None]


@partial(jax.jit, static_argnames=("graphdef", "temperature", "top_k"), donate_argnames="state")
def _advance(
    graphdef,
    params,
    tokens: Int[Array, "batch time"],
    state: LanguageModelState | None,
    key: Key[Array, ""],
    *,
    temperature: float,
    top_k: int | None,
) -> tuple[Int[Array, " batch"], LanguageModelState]:
    """Run over some tokens and draw the one after them. The given state is used up."""
    logits, new_state = nnx.merge(graphdef, params)(tokens, state)
    return sample(logits[:, -1], key, temperature=temperature, top_k=top_k), new_state


@partial(jax.jit, static_argnames=("graphdef", "temperature", "top_k"))
def _slide(
    graphdef,
    params,
    window: Int[Array, "batch context_length"],
    key: Key[Array, ""],
    *,
    temperature: float,
    top_k: int | None,
) -> tuple[Int[Array, " batch"], Int[Array, "batch context_length"]]:
    """Draw the token after a full window, and move the window on by it."""
    logits, _ = nnx.merge(graphdef, params)(window)
    token = sample(logits[:, -1], key, temperature=temperature, top_k=top_k)
    return token, jnp.concatenate([window[:, 1:], token[:, None].astype(window.dtype)], axis=1)


def generate(
    model: LanguageModel,
    prompt: Int[ArrayLike, "batch time"],
    num_tokens: int,
    *,
    key: Key[Array, ""],
    temperature: float = 1.0,
    top_k: int | None = None,
) -> Int[Array, "batch num_tokens"]:
    """The tokens that `stream` yields, side by side."""
    tokens = stream(model, prompt, num_tokens, key=key, temperature=temperature, top_k=top_k)
    return jnp.stack(list(tokens), axis=1)
