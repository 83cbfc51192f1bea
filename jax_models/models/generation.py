"""Generates text with a language model, token by token from the state that it carries."""

__all__ = ["generate", "stream"]

import sys
import time
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Key

from jax_models.models.language_model import LanguageModel, LanguageModelState, checked_tokens
from jax_models.models.sampling import (
    AnyKey,
    Token,
    checked_key,
    checked_temperature,
    checked_top_k,
    sample,
)
from jax_models.ops.checks import checked_size, described
from jax_models.ops.keywords import suggests_arguments

Leaves = list[Array]
Prompt = Int[Array, "batch time"] | Int[np.ndarray, "batch time"]
Tokens = Int[Array, "steps batch"]
Window = Int[Array, "batch context_length"]
Index = Int[ArrayLike, ""]
SHORTEST_PROMPT = 64
"""The shortest length to which a prompt is padded. Longer prompts are padded to a power of two."""
MOST_STEPS = 64
"""The largest number of steps in one call of the compiled program."""
CALL_SECONDS = 0.01
"""The time that one call of `stream` should take with `steps_per_call="auto"`."""


class Options(NamedTuple):
    """The options of `sample`. To draw from all tokens, `top_k` is the size of the vocabulary."""

    temperature: Float[ArrayLike, ""]
    top_k: Int[ArrayLike, ""]


@suggests_arguments
def stream(
    model: LanguageModel,
    prompt: Int[ArrayLike, "batch time"],
    num_tokens: int,
    *,
    key: AnyKey,
    temperature: float = 1.0,
    top_k: int | None = None,
    steps_per_call: int | Literal["auto"] = "auto",
) -> Iterator[Int[np.ndarray, " batch"]]:
    """Continues a prompt: yields the int32 tokens (batch,) of one step after the other.

        >>> model = RNNLanguageModelConfig(vocab_size=9, hidden_features=8).build(rngs=nnx.Rngs(0))
        >>> for token in stream(model, jnp.zeros((2, 4), int), 3, key=jax.random.key(0)):
        ...     assert token.shape == (2,)

    The prompt runs once. Then each token costs one `step` from the carried state, regardless of the
    length of the text. The exception is a model with a `context_length`: once the text fills it,
    each token costs a run over the last `context_length` tokens.

    For each batch size, one compiled program steps through the tokens of all prompts and options,
    and a second one handles full contexts. The prompt is padded to a power of two, and each padded
    length has its own program.

    For small models, dispatch costs more than the computation, so `stream` runs several steps in
    one call. It dispatches the next call before it yields the tokens of the current one, so the
    device works while the caller reads. If the caller stops early, the tokens of up to two calls
    are discarded.

    Args:
        model: the language model. Its dropout, if it has any, is turned off.
        prompt: tokens, with at least one row and at least one token per row.
        num_tokens: the number of tokens to draw.
        key: a random key, such as `jax.random.key(0)`. The same key gives the same text.
        temperature: flattens (> 1) or sharpens (< 1) the distribution; 0 is greedy.
        top_k: draw only from the k likeliest tokens. None, or more than the vocabulary size: from
            all.
        steps_per_call: number of steps in one call, 1 to 64. "auto" chooses the number that takes
            about 10 ms to compute and read, but at most twice that of the previous call. The tokens
            do not depend on this argument.

    Raises:
        TypeError: the prompt does not hold integers, the temperature is not a number, the key is
            not a key, or (at the first token) it runs under `jit`.
        ValueError: the prompt is empty or of the wrong rank, a token is not in the vocabulary,
            num_tokens or top_k is not a positive integer, steps_per_call is neither "auto" nor 1 to
            64, the temperature is negative, the parameters of the model have no values, or (at that
            token) its logits are NaN or infinite.

    """
    return _host(_calls(model, prompt, num_tokens, key, temperature, top_k, steps_per_call))


@suggests_arguments
def generate(
    model: LanguageModel,
    prompt: Int[ArrayLike, "batch time"],
    num_tokens: int,
    *,
    key: AnyKey,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> Int[Array, "batch num_tokens"]:
    """Continues a prompt: returns the tokens that `stream` yields, side by side.

        >>> model = RNNLanguageModelConfig(vocab_size=9, hidden_features=8).build(rngs=nnx.Rngs(0))
        >>> generate(model, jnp.zeros((2, 4), int), 3, key=jax.random.key(0)).shape
        (2, 3)

    The arguments are those of `stream`, and so are the compiled programs. Under `jit`, where no
    error can be raised, tokens drawn from NaN or infinite logits are −1.
    """
    calls = list(_calls(model, prompt, num_tokens, key, temperature, top_k, MOST_STEPS))
    if isinstance(calls[0][0], Tracer):
        return jnp.concatenate([tokens[:count] for tokens, count in calls]).T
    return jax.device_put(np.stack([*_host(iter(calls))], axis=1))


def _calls(
    model, prompt, num_tokens, key, temperature, top_k, steps_per_call
) -> Iterator[tuple[Tokens, int]]:
    """Checks the arguments immediately, and returns the iterator over the decoder's calls."""
    if not isinstance(model, LanguageModel):
        raise TypeError(f"model: expected a LanguageModel, got {described(model)}")
    vocab_size = model.config.vocab_size
    limit = model.context_length or sys.maxsize
    prompt = _checked_prompt(prompt, vocab_size)[:, -limit:]
    num_tokens = checked_size("num_tokens", num_tokens)
    options = Options(checked_temperature(temperature), checked_top_k(top_k, vocab_size))
    key = checked_key(key)
    inference = {"deterministic": True, "fixed_filters": True}
    graphdef, variables = nnx.split(nnx.view(model, raise_if_not_found=False, **inference))
    arrays, structure = jax.tree.flatten(variables)
    if any(isinstance(array, jax.ShapeDtypeStruct) for array in arrays):
        raise ValueError("model: its parameters have no values, as under nnx.eval_shape: load them")
    is_count = hasattr(steps_per_call, "__index__") and steps_per_call is not True
    if steps_per_call != "auto" and not (is_count and 1 <= steps_per_call <= MOST_STEPS):
        raise ValueError(
            f'steps_per_call: expected "auto" or 1 … {MOST_STEPS}, got {steps_per_call!r}'
        )
    decoder = _decoder(graphdef, structure, limit)
    return decoder.calls(arrays, prompt, num_tokens, key, options, steps_per_call)


def _checked_prompt(prompt, vocab_size: int) -> Prompt:
    """Returns the prompt as int32, on the host unless it is traced, or raises an error."""
    try:
        values = prompt if isinstance(prompt, Tracer) else np.asarray(prompt)
    except ValueError:
        raise ValueError("prompt: expected rows of one length, got ragged ones") from None
    if values.ndim != 2 or 0 in values.shape:
        raise ValueError(f"prompt: expected shape (batch ≥ 1, time ≥ 1), got {values.shape}")
    tokens = checked_tokens("prompt", values, vocab_size)
    return tokens.astype(jnp.int32) if isinstance(values, Tracer) else values.astype(np.int32)


def _host(calls: Iterator[tuple[Tokens, int]]) -> Iterator[Int[np.ndarray, " batch"]]:
    """Yields the tokens of each call, after the next call has been dispatched."""
    tokens, count = next(calls)
    if isinstance(tokens, Tracer):
        raise TypeError("stream: under jit its tokens have no values yet; generate runs there")
    for following in calls:
        yield from _drawn(tokens, count)
        tokens, count = following
    yield from _drawn(tokens, count)


def _drawn(tokens: Tokens, count: int) -> Iterator[Int[np.ndarray, " batch"]]:
    """Yields the first `count` tokens of a call. Raises an error at one that could not be drawn."""
    for token in np.asarray(tokens)[:count]:
        if (token < 0).any():
            rows = np.flatnonzero(token < 0).tolist()
            raise ValueError(
                f"model: expected finite logits, got NaN or infinite ones in rows {rows}; check "
                "that its weights are finite"
            )
        yield token


class Decoder:
    """The compiled programs that draw tokens from the models of one structure.

    Each program takes the model's arrays as a flat list, because flattening a tree of variables at
    every call would cost more time than a small model. Token i is drawn with the key
    `fold_in(key, i)`.
    """

    def __init__(self, graphdef, structure, limit: int):
        self.graphdef = graphdef
        self.structure = structure
        self.limit = limit

    @partial(jax.jit, static_argnums=0)
    def first(
        self,
        arrays: Leaves,
        prompt: Prompt,
        length: Index,
        key: Key[Array, ""],
        options: Options,
    ) -> tuple[Tokens, tuple[Token, LanguageModelState]]:
        """Draws the token after `length` tokens of a prompt, and returns the state before it."""
        lengths = jnp.full(len(prompt), length, jnp.int32)
        logits, state = self._model(arrays)(prompt, lengths=lengths)
        logits = jax.lax.dynamic_index_in_dim(logits, length - 1, axis=1, keepdims=False)
        token = _token(logits, jax.random.fold_in(key, 0), options)
        return token[None], (token, state)

    @partial(jax.jit, static_argnums=0, donate_argnums=2)
    def steps(
        self,
        arrays: Leaves,
        carry: tuple[Token, LanguageModelState],
        key: Key[Array, ""],
        options: Options,
        start: Index,
        count: Index,
    ) -> tuple[Tokens, tuple[Token, LanguageModelState]]:
        """Draws the tokens start … start + count − 1, padded with zeros to `MOST_STEPS`.

        The carry is the last token and the state before it. The given carry is donated.
        """

        def step(carry, key):
            logits, state = self._model(arrays).step(*carry)
            token = _token(logits, key, options)
            return token, (token, state)

        return _repeat(step, carry, len(carry[0]), key, start, count)

    @partial(jax.jit, static_argnums=0, donate_argnums=2)
    def slides(
        self,
        arrays: Leaves,
        window: Window,
        key: Key[Array, ""],
        options: Options,
        start: Index,
        count: Index,
    ) -> tuple[Tokens, Window]:
        """Like `steps`, but computes each token from a full window, which then moves by one."""

        def slide(window, key):
            logits, _ = self._model(arrays)(window)
            token = _token(logits[:, -1], key, options)
            return token, jnp.concatenate([window[:, 1:], token[:, None]], axis=1)

        return _repeat(slide, window, len(window), key, start, count)

    def calls(
        self,
        arrays: Leaves,
        prompt: Prompt,
        num_tokens: int,
        key: Key[Array, ""],
        options: Options,
        steps_per_call: int | Literal["auto"],
    ) -> Iterator[tuple[Tokens, int]]:
        """Yields the tokens of each call after a prompt, and the number of them that are valid."""
        length = prompt.shape[1]
        room = min(num_tokens, self.limit - length + 1)
        tokens, carry = self.first(arrays, self._padded(prompt), length, key, options)
        yield tokens, 1

        def advance(program, carry, start: int, end: int) -> Iterator[tuple[Tokens, int]]:
            before, count = 1, 1 if steps_per_call == "auto" else steps_per_call
            while start < end:
                began = time.perf_counter()
                count = min(count, end - start)
                tokens, carry = program(arrays, carry, key, options, start, count)
                yield tokens, count  # meanwhile `_host` has waited for the previous call
                start += count
                if steps_per_call == "auto":
                    a_step = (time.perf_counter() - began) / before
                    in_time = int(CALL_SECONDS / a_step)
                    before, count = count, max(1, min(2 * count, MOST_STEPS, in_time))

        # Until the context is full, each token is computed by a step from the state.
        drawn = [(tokens, 1)]
        for call in advance(self.steps, carry, 1, room):
            if room < num_tokens:
                drawn.append(call)
            yield call
        # From then on, each token is computed by a run over the last `limit` tokens.
        if room < num_tokens:
            numpy = jnp if isinstance(tokens, Tracer) else np
            text = [prompt.T, *(numpy.asarray(tokens)[:count] for tokens, count in drawn)]
            window = numpy.concatenate(text)[-self.limit :].T
            window = jax.device_put(window, may_alias=False)  # `slides` donates it
            yield from advance(self.slides, window, room, num_tokens)

    def _padded(self, prompt: Prompt) -> Prompt:
        """Pads the prompt with zeros to one of a few lengths, so that few programs are compiled."""
        length = prompt.shape[1]
        size = min(self.limit, max(SHORTEST_PROMPT, 1 << (length - 1).bit_length()))
        numpy = jnp if isinstance(prompt, Tracer) else np
        return numpy.pad(prompt, ((0, 0), (0, size - length)))

    def _model(self, arrays: Leaves) -> LanguageModel:
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.structure, arrays))


def _token(logits: Float[Array, "batch vocab"], key: Key[Array, ""], options: Options) -> Token:
    return sample(logits, key, **options._asdict()).astype(jnp.int32)


def _repeat(advance, carry, batch_size: int, key, start: Index, count: Index) -> tuple[Tokens, Any]:
    """Calls `advance` `count` times, and returns the drawn tokens and the last carry."""
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, start + jnp.arange(MOST_STEPS))

    def once(i, tokens_and_carry):
        tokens, carry = tokens_and_carry
        token, carry = advance(carry, keys[i])
        return tokens.at[i].set(token), carry

    tokens = jnp.zeros((MOST_STEPS, batch_size), jnp.int32)
    return jax.lax.fori_loop(0, count, once, (tokens, carry))


_decoder = lru_cache(maxsize=16)(Decoder)
