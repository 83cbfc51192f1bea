"""Generates text with a language model, token by token from the state that it carries."""

__all__ = ["generate", "stream"]

import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

from jax_models.checks.keywords import suggests_arguments
from jax_models.checks.values import checked_size, described
from jax_models.models.decoder import (
    MOST_STEPS,
    SHORTEST_CACHE,
    Calls,
    Options,
    Tokens,
    decoder,
    padded_length,
)
from jax_models.models.language_model import LanguageModel
from jax_models.models.prompts import checked_prompts
from jax_models.models.sampling import (
    AnyKey,
    checked_key,
    checked_repetition_penalty,
    checked_stop_tokens,
    checked_temperature,
    checked_top_k,
    checked_top_p,
)


@suggests_arguments
def stream(
    model: LanguageModel,
    prompt: Int[ArrayLike, "batch time"],
    num_tokens: int,
    *,
    key: AnyKey | None = None,
    mask: Bool[ArrayLike, "batch time"] | Int[ArrayLike, "batch time"] | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop_tokens: int | Sequence[int] = (),
    steps_per_call: int | Literal["auto"] = "auto",
) -> Iterator[Int[np.ndarray, " batch"]]:
    """Continues a prompt: yields the int32 tokens (batch,) of one step after the other.

        >>> model = RNNLanguageModelConfig(vocab_size=9, hidden_features=8).build(rngs=nnx.Rngs(0))
        >>> for token in stream(model, jnp.zeros((2, 4), int), 3, key=jax.random.key(0)):
        ...     assert token.shape == (2,)

    The prompt runs once. Then each token costs one `step` from the carried state, regardless of the
    length of the text. The exception is a model with a `context_length`: once the text fills it,
    each token costs a run over the last `context_length` tokens.

    Prompts of different lengths are padded on the left or the right, and `mask` tells the real
    tokens from the padding, as the `attention_mask` of transformers' tokenizers does. The padding
    has no influence, because the rows are moved to the left before the model reads them.

    For each batch size, one compiled program steps through the tokens of all prompts and options,
    and a second one handles full contexts. A prompt of several tokens is padded to a power of two,
    at least 16, and each padded length has its own program. A model with full attention has
    programs for each size of its cache, a power of two.

    For small models, dispatch costs more than the computation, so `stream` runs several steps in
    one call. It dispatches the next call before it yields the tokens of the current one, so the
    device works while the caller reads. If the caller stops early, the tokens of up to two calls
    are discarded.

    Args:
        model: the language model. Its dropout, if it has any, is turned off.
        prompt: tokens, with at least one row and at least one token per row.
        num_tokens: the number of tokens to draw, unless all rows stop earlier.
        key: a random key, such as `jax.random.key(0)`. The same key gives the same text. May be
            None only if the temperature is 0.
        mask: True or 1 for the real tokens of the prompt, which are side by side in each row, False
            or 0 for padding. None: all tokens are real.
        temperature: flattens (> 1) or sharpens (< 1) the distribution; 0 is greedy.
        top_k: draw only from the k likeliest tokens. None, or more than the vocabulary size: from
            all.
        top_p: draw only from the fewest tokens whose probabilities sum to `top_p` or more, after
            temperature and `top_k`. None: from all.
        repetition_penalty: divides the positive logits, and multiplies the negative ones, of the
            tokens that occur in the prompt (as far as the model reads it) or have been drawn.
        stop_tokens: a token, or several, that end a row. The row then repeats this token, and
            `stream` ends once all rows have stopped.
        steps_per_call: number of steps in one call, 1 to 64. "auto" chooses the number that takes
            about 10 ms to compute and read, but at most twice that of the previous call. The tokens
            do not depend on this argument.

    Raises:
        TypeError: the prompt or stop_tokens do not hold integers, the mask holds neither booleans
            nor integers, the temperature, top_p or the penalty is not a number, the key is not a
            key, or (at the first token) it runs under `jit`.
        ValueError: the prompt is empty or of the wrong rank, a token is not in the vocabulary, the
            mask has another shape or padding between real tokens, num_tokens or top_k is not a
            positive integer, steps_per_call is neither "auto" nor 1 to 64, the temperature is
            negative, top_p is outside 0 … 1, the penalty is not positive, the parameters of the
            model have no values, or (at that token) its logits are NaN or infinite.

    """
    options = (temperature, top_k, top_p, repetition_penalty, stop_tokens)
    return _host(*_calls(model, prompt, num_tokens, key, mask, options, steps_per_call))


@suggests_arguments
def generate(
    model: LanguageModel,
    prompt: Int[ArrayLike, "batch time"],
    num_tokens: int,
    *,
    key: AnyKey | None = None,
    mask: Bool[ArrayLike, "batch time"] | Int[ArrayLike, "batch time"] | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop_tokens: int | Sequence[int] = (),
) -> Int[Array, "batch num_tokens"]:
    """Continues a prompt: returns the tokens that `stream` yields, side by side.

        >>> model = RNNLanguageModelConfig(vocab_size=9, hidden_features=8).build(rngs=nnx.Rngs(0))
        >>> generate(model, jnp.zeros((2, 4), int), 3, key=jax.random.key(0)).shape
        (2, 3)

    The arguments are those of `stream`, and so are the compiled programs. Under `jit`, where no
    error can be raised, tokens drawn from NaN or infinite logits are −1. Once all rows have stopped
    at one of the `stop_tokens`, nothing more is computed, and the last columns repeat it.
    """
    options = (temperature, top_k, top_p, repetition_penalty, stop_tokens)
    calls, stops = _calls(model, prompt, num_tokens, key, mask, options, MOST_STEPS)
    first = next(calls)
    if isinstance(first[0], Tracer):
        return jnp.concatenate([tokens[:count] for tokens, count in (first, *calls)]).T
    tokens = np.stack([*_host(chain([first], calls), stops)], axis=1)
    left = int(num_tokens) - tokens.shape[1]
    return jax.device_put(np.pad(tokens, ((0, 0), (0, left)), "edge"))


def _calls(
    model, prompt, num_tokens, key, mask, options, steps_per_call
) -> tuple[Calls, Bool[np.ndarray, " vocab"]]:
    """Checks the arguments immediately, and returns the decoder's calls and the stop tokens."""
    if not isinstance(model, LanguageModel):
        raise TypeError(f"model: expected a LanguageModel, got {described(model)}")
    vocab_size = model.config.vocab_size
    limit = model.context_length or sys.maxsize
    prompt, lengths = checked_prompts(prompt, mask, vocab_size, limit)
    num_tokens = checked_size("num_tokens", num_tokens)
    temperature, top_k, top_p, repetition_penalty, stop_tokens = options
    stops = checked_stop_tokens(stop_tokens, vocab_size)
    options = Options(
        checked_temperature(temperature),
        checked_top_k(top_k, vocab_size),
        checked_top_p(top_p),
        checked_repetition_penalty(repetition_penalty),
        jax.device_put(stops),
    )
    if key is None and options.temperature != 0:
        raise TypeError("key: expected a key, such as jax.random.key(0), unless temperature=0")
    key = checked_key(jax.random.key(0) if key is None else key)  # greedy decoding draws nothing
    # A cache of keys and values has room for the text, rounded up to share compiled programs.
    size = padded_length(prompt.shape[1] + num_tokens, SHORTEST_CACHE, limit)
    views = {"deterministic": True, "fixed_filters": True, "max_length": size}
    # Split the model into a structure, which selects a compiled decoder, and its arrays, flattened
    # once.
    graphdef, variables = nnx.split(nnx.view(model, raise_if_not_found=False, **views))
    arrays, structure = jax.tree.flatten(variables)
    if any(isinstance(array, jax.ShapeDtypeStruct) for array in arrays):
        raise ValueError("model: its parameters have no values, as under nnx.eval_shape: load them")
    is_count = hasattr(steps_per_call, "__index__") and steps_per_call is not True
    if steps_per_call != "auto" and not (is_count and 1 <= steps_per_call <= MOST_STEPS):
        raise ValueError(
            f'steps_per_call: expected "auto" or 1 … {MOST_STEPS}, got {steps_per_call!r}'
        )
    draw = decoder(graphdef, structure, limit)
    return draw.calls(arrays, prompt, lengths, num_tokens, key, options, steps_per_call), stops


def _host(
    calls: Iterator[tuple[Tokens, int]], stops: Bool[np.ndarray, " vocab"]
) -> Iterator[Int[np.ndarray, " batch"]]:
    """Yields the tokens of each call, after the next call has been dispatched.

    Ends once all rows have stopped. Raises an error at a token that could not be drawn.
    """
    call = next(calls)
    if isinstance(call[0], Tracer):
        raise TypeError("stream: under jit its tokens have no values yet; generate runs there")
    # Dispatch the next call before reading the tokens of this one, so that the device never waits
    # for the host.
    stopped = np.zeros(call[0].shape[1], bool)
    while call is not None:
        following = next(calls, None)
        for token in np.asarray(call[0])[: call[1]]:
            if (token < 0).any():
                rows = np.flatnonzero(token < 0).tolist()
                raise ValueError(
                    f"model: expected finite logits, got NaN or infinite ones in rows {rows}; "
                    "check that its weights are finite"
                )
            yield token
            stopped |= stops[token]
            if stopped.all():
                return
        call = following
