"""Text from a language model, token by token from its carried state."""

import operator
import sys
import time
from collections.abc import Iterator
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Key

from jax_models.language_model import LanguageModel, LanguageModelState, checked_tokens
from jax_models.ops import carry_dtype

Arrays = list[Array]
Token = Int[Array, " batch"]
Tokens = Int[Array, "steps batch"]
Window = Int[Array, "batch context_length"]
Index = Int[ArrayLike, ""]
CALL_SECONDS, MOST_STEPS = 0.01, 64
"""Of a call of `stream`, unless one step takes longer."""


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
) -> Iterator[Int[np.ndarray, " batch"]]:
    """Continue a prompt, yielding the int32 tokens (batch,) of one step after the other.

    The prompt runs once; then each token costs one `step` from the carried state, however long the
    text. Where the model has a `context_length` and the text has filled it, each token is drawn
    from the last `context_length` tokens alone, by a run over all of them.

    A call costs as much as several steps of a small model. So it takes as many as make some 10 ms,
    with the reading of their tokens, though no more than twice as many as the call before, and 64;
    of a large model it is one. Its tokens are handed out once the next call is under way: the
    device works on while the caller reads, and one who stops early leaves two calls unread.

    Args:
        model: dropout, if it has any, is off.
        prompt: at least one token a row.
        num_tokens: how many to draw.
        key: the randomness; the same key gives the same text.
        temperature: flattens (> 1) or sharpens (< 1) the distribution; 0 is greedy.
        top_k: draw from the k likeliest tokens only.

    Raises:
        TypeError: the prompt, num_tokens or top_k is not of integers.
        ValueError: the prompt is empty or of the wrong rank, a token is not in the vocabulary, or
            an option is out of range.

    """
    decoder, arrays, prompt = _prepared(model, prompt, num_tokens, temperature, top_k)
    return _host(decoder.stream(arrays, prompt, num_tokens, key))


def _host(calls: Iterator[tuple[Token | Tokens, int]]) -> Iterator[Int[np.ndarray, " batch"]]:
    """The tokens of each call, once the next call has been made."""
    tokens, count = next(calls)
    for following in calls:
        yield from np.atleast_2d(tokens)[:count]
        tokens, count = following
    yield from np.atleast_2d(tokens)[:count]


def generate(
    model: LanguageModel,
    prompt: Int[ArrayLike, "batch time"],
    num_tokens: int,
    *,
    key: Key[Array, ""],
    temperature: float = 1.0,
    top_k: int | None = None,
) -> Int[Array, "batch num_tokens"]:
    """The tokens that `stream` yields, side by side: one compiled call for this `num_tokens`."""
    decoder, arrays, prompt = _prepared(model, prompt, num_tokens, temperature, top_k)
    return decoder.text(arrays, prompt, num_tokens, key)


def _prepared(
    model, prompt, num_tokens, temperature, top_k
) -> tuple["Decoder", Arrays, Int[Array, "batch time"]]:
    """The decoder, the model's arrays and the prompt, or what is wrong with the arguments."""
    prompt = checked_tokens("prompt", prompt, model.config.vocab_size)
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise ValueError(f"prompt: expected shape (batch, time ≥ 1), got {prompt.shape}")
    temperature = float(temperature)
    if operator.index(num_tokens) < 1:
        raise ValueError(f"num_tokens: expected at least 1, got {num_tokens}")
    if not temperature >= 0:
        raise ValueError(f"temperature: expected at least 0, got {temperature}")
    if top_k is not None and operator.index(top_k) < 1:
        raise ValueError(f"top_k: expected at least 1, got {top_k}")
    inference = {"deterministic": True, "fixed_filters": True}
    graphdef, variables = nnx.split(nnx.view(model, raise_if_not_found=False, **inference))
    arrays, structure = jax.tree.flatten(variables)
    limit = model.config.context_length or sys.maxsize
    decoder = _decoder(graphdef, structure, limit, temperature, top_k)
    return decoder, arrays, prompt.astype(jnp.int32)[:, -limit:]


class Decoder:
    """The compiled programs that draw tokens from the models of one structure.

    Each takes the model's arrays as a flat list: to flatten a tree of variables at every call
    would cost more than a small model does. The randomness of token i is `fold_in(key, i)`.
    """

    def __init__(self, graphdef, structure, limit: int, temperature: float, top_k):
        self.graphdef = graphdef
        self.structure = structure
        self.limit = limit
        self.draw = partial(sample, temperature=temperature, top_k=top_k)

    @partial(jax.jit, static_argnums=0)
    def first(
        self, arrays: Arrays, prompt: Int[Array, "batch time"], key: Key[Array, ""]
    ) -> tuple[Token, LanguageModelState]:
        """The token after a prompt, and the state before that token."""
        return self._next(arrays, prompt, None, jax.random.fold_in(key, 0))

    @partial(jax.jit, static_argnums=0, donate_argnums=3)
    def steps(
        self,
        arrays: Arrays,
        token: Token,
        state: LanguageModelState,
        key: Key[Array, ""],
        start: Index,
        count: Index,
    ) -> tuple[Tokens, Token, LanguageModelState]:
        """Tokens start … start + count − 1, and zeros up to `MOST_STEPS`; the last; its state.

        The state is that before the last token. The given one is used up.
        """
        keys = _fold_in(key, start + jnp.arange(MOST_STEPS))

        def step(i, carry):
            token, state, tokens = carry
            token, state = self._next(arrays, token[:, None], state, keys[i])
            return token, state, tokens.at[i].set(token)

        tokens = jnp.zeros((MOST_STEPS, *token.shape), token.dtype)
        token, state, tokens = jax.lax.fori_loop(0, count, step, (token, state, tokens))
        return tokens, token, state

    @partial(jax.jit, static_argnums=0, donate_argnums=2)
    def slide(
        self, arrays: Arrays, window: Window, key: Key[Array, ""], index: Index
    ) -> tuple[Token, Window]:
        """The token after a full window, and the window moved on by it. The given is used up."""
        token, _ = self._next(arrays, window, None, jax.random.fold_in(key, index))
        return token, jnp.concatenate([window[:, 1:], token[:, None]], axis=1)

    def stream(
        self, arrays: Arrays, prompt, num_tokens: int, key
    ) -> Iterator[tuple[Token | Tokens, int]]:
        """The tokens after a prompt, call by call, and how many of a call count."""
        token, state = self.first(arrays, prompt, key)
        yield token, 1
        text, room = [(token, 1)], self._room(prompt, num_tokens)
        start = count = before = 1
        while start < room:
            began = time.perf_counter()
            count = min(count, room - start)
            tokens, token, state = self.steps(arrays, token, state, key, start, count)
            yield tokens, count  # by then the call before has been waited for
            a_step = (time.perf_counter() - began) / before
            if room < num_tokens:
                text.append((tokens, count))
            start, before = start + count, count
            count = max(1, min(2 * count, MOST_STEPS, int(CALL_SECONDS / a_step)))
        if room < num_tokens:
            drawn = (np.atleast_2d(tokens)[:count] for tokens, count in text)
            window = jnp.array(np.concatenate([prompt.T, *drawn])[-self.limit :].T)
            for index in range(room, num_tokens):
                token, window = self.slide(arrays, window, key, index)
                yield token, 1

    @partial(jax.jit, static_argnums=(0, 3))
    def text(self, arrays: Arrays, prompt, num_tokens: int, key) -> Int[Array, "batch num_tokens"]:
        """The tokens after a prompt, in one call: a scan of steps, and one of windows."""

        def step(carry, key):
            token, state = carry
            token, state = self._next(arrays, token[:, None], state, key)
            return (token, state), token

        def slide(window, index):
            token, window = self.slide(arrays, window, key, index)
            return window, token

        room = self._room(prompt, num_tokens)
        first, state = self.first(arrays, prompt, key)
        _, tokens = jax.lax.scan(step, (first, state), _fold_in(key, jnp.arange(1, room)))
        tokens = jnp.concatenate([first[None], tokens]).T
        if room == num_tokens:
            return tokens
        window = jnp.concatenate([prompt, tokens], axis=1)[:, -self.limit :]
        _, others = jax.lax.scan(slide, window, jnp.arange(room, num_tokens))
        return jnp.concatenate([tokens, others.T], axis=1)

    def _next(self, arrays, tokens, state, key) -> tuple[Token, LanguageModelState]:
        model = nnx.merge(self.graphdef, jax.tree.unflatten(self.structure, arrays))
        logits, state = model(tokens, state)
        return self.draw(logits[:, -1], key).astype(jnp.int32), state

    def _room(self, prompt, num_tokens: int) -> int:
        """How many tokens come from the carried state: those until the context is full."""
        return min(num_tokens, self.limit - prompt.shape[1] + 1)


_fold_in = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
_decoder = lru_cache(maxsize=16)(Decoder)
