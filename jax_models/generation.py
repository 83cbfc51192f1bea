"""Text from a language model, token by token from its carried state."""

import operator
import sys
from collections.abc import Iterator
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Key

from jax_models.hyena import with_fixed_filters
from jax_models.language_model import LanguageModel, LanguageModelState, checked_tokens
from jax_models.ops import carry_dtype

Arrays = list[Array]
Token = Int[Array, " batch"]
Window = Int[Array, "batch context_length"]
Index = Int[Array, ""]


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
    from the last `context_length` tokens alone, by a run over all of them. A token is handed out
    once the computation of the next is under way, and the device works on while the caller reads.

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
    decoder, arrays, prompt = _prepared(model, prompt, num_tokens, temperature, top_k)
    return _one_ahead(decoder.stream(arrays, prompt, num_tokens, key))


def _one_ahead(tokens: Iterator[Token]) -> Iterator[Token]:
    """Each once the next has been asked for."""
    token = next(tokens)
    for following in tokens:
        yield token
        token = following
    yield token


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
    evaluating = nnx.view(model, deterministic=True, raise_if_not_found=False)
    graphdef, variables = nnx.split(with_fixed_filters(evaluating))
    arrays, structure = jax.tree.flatten(variables)
    limit = model.config.context_length or sys.maxsize
    decoder = _decoder(graphdef, structure, limit, temperature, top_k)
    return decoder, arrays, prompt.astype(jnp.int32)[:, -limit:]


class Decoder:
    """The compiled programs that draw tokens from the models of one structure.

    Each takes the model's arrays as a flat list: to flatten a tree of variables at every token
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
    ) -> tuple[Token, LanguageModelState, Index]:
        """The token after a prompt, the state before that token, and the index of the next."""
        token, state = self._next(arrays, prompt, None, key, jnp.int32(0))
        return token, state, jnp.int32(1)

    @partial(jax.jit, static_argnums=0, donate_argnums=(3, 4))
    def step(
        self,
        arrays: Arrays,
        token: Token,
        state: LanguageModelState,
        index: Index,
        key: Key[Array, ""],
    ) -> tuple[Token, LanguageModelState, Index]:
        """The token after a token. The given state and index are used up."""
        token, state = self._next(arrays, token[:, None], state, key, index)
        return token, state, index + 1

    @partial(jax.jit, static_argnums=0, donate_argnums=(2, 3))
    def slide(
        self, arrays: Arrays, window: Window, index: Index, key: Key[Array, ""]
    ) -> tuple[Token, Window, Index]:
        """The token after a full window, and the window moved on by it. The given is used up."""
        token, _ = self._next(arrays, window, None, key, index)
        return token, jnp.concatenate([window[:, 1:], token[:, None]], axis=1), index + 1

    def stream(self, arrays: Arrays, prompt, num_tokens: int, key) -> Iterator[Token]:
        """The tokens after a prompt, one call each."""
        token, state, index = self.first(arrays, prompt, key)
        yield token
        tokens, room = [token], self._room(prompt, num_tokens)
        for _ in range(1, room):
            token, state, index = self.step(arrays, token, state, index, key)
            yield token
            if room < num_tokens:
                tokens.append(token)
        if room < num_tokens:
            window = jnp.concatenate([prompt, jnp.stack(tokens, axis=1)], axis=1)[:, -self.limit :]
            for _ in range(room, num_tokens):
                token, window, index = self.slide(arrays, window, index, key)
                yield token

    @partial(jax.jit, static_argnums=(0, 3))
    def text(self, arrays: Arrays, prompt, num_tokens: int, key) -> Int[Array, "batch num_tokens"]:
        """The tokens after a prompt, in one call: a scan of steps, and one of windows."""

        def step(carry, _):
            carry = self.step(arrays, *carry, key)
            return carry, carry[0]

        def slide(carry, _):
            token, *carry = self.slide(arrays, *carry, key)
            return tuple(carry), token

        room = self._room(prompt, num_tokens)
        first = self.first(arrays, prompt, key)
        (_, _, index), tokens = jax.lax.scan(step, first, length=room - 1)
        tokens = jnp.concatenate([first[0][None], tokens]).T
        if room == num_tokens:
            return tokens
        window = jnp.concatenate([prompt, tokens], axis=1)[:, -self.limit :]
        _, others = jax.lax.scan(slide, (window, index), length=num_tokens - room)
        return jnp.concatenate([tokens, others.T], axis=1)

    def _next(self, arrays, tokens, state, key, index) -> tuple[Token, LanguageModelState]:
        model = nnx.merge(self.graphdef, jax.tree.unflatten(self.structure, arrays))
        logits, state = model(tokens, state)
        token = self.draw(logits[:, -1], jax.random.fold_in(key, index))
        return token.astype(jnp.int32), state

    def _room(self, prompt, num_tokens: int) -> int:
        """How many tokens come from the carried state: those until the context is full."""
        return min(num_tokens, self.limit - prompt.shape[1] + 1)


_decoder = lru_cache(maxsize=16)(Decoder)
