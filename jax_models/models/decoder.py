"""The compiled programs that draw the tokens of a text."""

import time
from collections.abc import Callable, Generator
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Key

from jax_models.models.language_model import LanguageModel
from jax_models.models.prompts import Lengths, Prompt, last_window
from jax_models.models.sampling import Token, penalize, sample

Leaves = list[Array]
Tokens = Int[Array, "steps batch"]
Index = Int[ArrayLike, ""]
MOST_STEPS = 64
"""The largest number of steps in one call of the compiled program."""
CALL_SECONDS = 0.01
"""The time that one call of `stream` should take with `steps_per_call="auto"`."""
SHORTEST_CACHE = 64
"""The fewest slots of a cache of keys and values. A larger one has a power of two of slots."""
SHORTEST_PROMPT = 16
"""The shortest length to which a prompt is padded.

On a CPU, reading the weights takes most of the time of a short prompt: in models with 12 layers of
768 features, a run over 8 tokens takes as long as 1.7 steps, over 16 as 2.0, over 64 as 3.5.
"""


def padded_length(length: int, shortest: int, limit: int) -> int:
    """Rounds a length up to one of a few sizes, so that few programs compile.

    A length of one remains one, because many texts begin with a single token.
    """
    return 1 if length == 1 else min(limit, max(shortest, 1 << (length - 1).bit_length()))


class Options(NamedTuple):
    """How tokens are drawn. To draw from all tokens, `top_k` is the size of the vocabulary."""

    temperature: Float[ArrayLike, ""]
    top_k: Int[ArrayLike, ""]
    top_p: Float[ArrayLike, ""]
    repetition_penalty: Float[ArrayLike, ""]
    stops: Bool[Array, " vocab"]
    """Whether each token of the vocabulary ends a row."""


class DrawHistory(NamedTuple):
    """What the next tokens depend on, besides the logits."""

    token: Token
    """The last token of each row. A row that has stopped repeats it."""
    seen: Bool[Array, "batch vocab"]
    """The tokens of the prompt and those drawn so far."""
    stopped: Bool[Array, " batch"]


Calls = Generator[tuple[Tokens, int], Any, Any]
Carry = tuple[DrawHistory, Any]
"""The history of the draws, and what the model reads next.

For `steps`, this is the state before the last token. For `slides`, it is the window of the text and
the lengths of its rows.
"""


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
        lengths: Lengths,
        key: Key[Array, ""],
        options: Options,
    ) -> tuple[Tokens, Carry]:
        """Draws the token after the prompts, whose rows have `lengths` tokens and then padding."""
        model = self._model(arrays)
        # Run over the prompts, and keep only each row's last logits and the state there.
        logits, state = model.last_logits(prompt, lengths=lengths)
        batch_size, time = prompt.shape
        vocab_size = model.config.vocab_size
        # Mark the tokens of each prompt as seen, for the repetition penalty. Padding is moved out
        # of range and dropped.
        is_real = jnp.arange(time, dtype=jnp.int32)[None] < lengths[:, None]
        row = jnp.arange(batch_size, dtype=jnp.int32)[:, None]
        seen = jnp.zeros((batch_size, vocab_size), bool)
        seen = seen.at[row, jnp.where(is_real, prompt, vocab_size)].set(True, mode="drop")
        # No token has been drawn yet, so the history holds only the prompts.
        before = DrawHistory(jnp.zeros(batch_size, jnp.int32), seen, jnp.zeros(batch_size, bool))
        drawn = _draw(logits, before, jax.random.fold_in(key, 0), options)
        return drawn.token[None], (drawn, state)

    @partial(jax.jit, static_argnums=0, donate_argnums=2)
    def steps(
        self,
        arrays: Leaves,
        carry: Carry,
        key: Key[Array, ""],
        options: Options,
        start: Index,
        count: Index,
    ) -> tuple[Tokens, Carry]:
        """Draws the tokens start … start + count − 1 of `MOST_STEPS`. The carry is donated."""

        def step(drawn: DrawHistory, state: Any, key: Key[Array, ""]) -> Carry:
            logits, state = self._model(arrays).step(drawn.token, state)
            return _draw(logits, drawn, key, options), state

        return _repeat(step, carry, key, start, count)

    @partial(jax.jit, static_argnums=0, donate_argnums=2)
    def slides(
        self,
        arrays: Leaves,
        carry: Carry,
        key: Key[Array, ""],
        options: Options,
        start: Index,
        count: Index,
    ) -> tuple[Tokens, Carry]:
        """Like `steps`, but computes each token from a whole window of the text.

        The window (batch, limit) of a row moves by one once the row fills it.
        """

        def slide(drawn: DrawHistory, text: Any, key: Key[Array, ""]) -> Carry:
            # Run over the whole window: its tokens move to other positions, so no state can be
            # reused.
            window, lengths = text
            logits, _ = self._model(arrays).last_logits(window, lengths=lengths)
            drawn = _draw(logits, drawn, key, options)
            # Append the token. A full window first drops its oldest token.
            moved = jnp.where(
                (lengths == self.limit)[:, None], jnp.roll(window, -1, axis=1), window
            )
            lengths = jnp.minimum(lengths + 1, self.limit)
            row = jnp.arange(len(window), dtype=jnp.int32)
            return drawn, (moved.at[row, lengths - 1].set(drawn.token), lengths)

        return _repeat(slide, carry, key, start, count)

    def calls(
        self,
        arrays: Leaves,
        prompt: Prompt,
        lengths: Lengths,
        num_tokens: int,
        key: Key[Array, ""],
        options: Options,
        steps_per_call: int | Literal["auto"],
    ) -> Calls:
        """Yields the tokens of each call after a prompt, and the number of them that are valid."""
        # Pad the prompt to one of a few lengths, so that few programs compile.
        longest = prompt.shape[1]
        room = min(num_tokens, self.limit - longest + 1)
        numpy: Any = np if isinstance(prompt, np.ndarray) else jnp
        padding = padded_length(longest, SHORTEST_PROMPT, self.limit) - longest
        padded = numpy.pad(prompt, ((0, 0), (0, padding)))
        tokens, carry = self.first(arrays, padded, lengths, key, options)
        yield tokens, 1

        drawn_calls = [(tokens, 1)]
        """The tokens from which the first window is made, if the text will fill the context."""

        def advance(program, carry, start: int, end: int) -> Calls:
            before, count = 1, 1 if steps_per_call == "auto" else steps_per_call
            while start < end:
                began = time.perf_counter()
                count = min(count, end - start)
                tokens, carry = program(arrays, carry, key, options, start, count)
                if start < room < num_tokens:
                    drawn_calls.append((tokens, count))
                yield tokens, count  # meanwhile the caller has waited for the previous call
                start += count
                # Choose the next number of steps so that a call takes about CALL_SECONDS. It at
                # most doubles, because one measurement is noisy.
                if steps_per_call == "auto":
                    a_step = (time.perf_counter() - began) / before
                    in_time = int(CALL_SECONDS / a_step)
                    before, count = count, max(1, min(2 * count, MOST_STEPS, in_time))
            return carry

        # Until the longest row fills the context, each token is computed by a step from the state.
        last, _ = yield from advance(self.steps, carry, 1, room)
        # From then on, each token is computed by a run over the last `limit` tokens.
        if room < num_tokens:
            numpy = jnp if isinstance(tokens, Tracer) else np
            text = numpy.concatenate(
                [numpy.asarray(tokens)[:count] for tokens, count in drawn_calls]
            )
            window = last_window(prompt, lengths, text, self.limit)
            yield from advance(self.slides, (last, window), room, num_tokens)

    def _model(self, arrays: Leaves) -> LanguageModel:
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.structure, arrays))


def _draw(
    logits: Float[Array, "batch vocab"], last: DrawHistory, key: Key[Array, ""], options: Options
) -> DrawHistory:
    """Draws a token in each row that has not stopped."""
    logits = penalize(logits, last.seen, options.repetition_penalty)
    token = sample(
        logits,
        key,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
    )
    # A row that has stopped repeats its last token.
    token = jnp.where(last.stopped, last.token, token.astype(jnp.int32))
    # A token is −1 if its logits are not finite. On a CPU, comparing is faster than a scatter.
    seen = last.seen | (token[:, None] == jnp.arange(logits.shape[1], dtype=jnp.int32)[None])
    return DrawHistory(token, seen, last.stopped | ((token >= 0) & options.stops[token]))


def _repeat(
    advance: Callable[[DrawHistory, Any, Key[Array, ""]], Carry], carry: Carry, key, start, count
) -> tuple[Tokens, Carry]:
    """Calls `advance` up to `count` times, until all rows have stopped.

    Returns `MOST_STEPS` tokens of each row, of which the last that was drawn is repeated, and the
    last carry.
    """
    # Each token has its own key, which does not depend on the number of steps per call.
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, start + jnp.arange(MOST_STEPS))

    def is_unfinished(loop) -> Bool[Array, ""]:
        i, _, (drawn, _) = loop
        return (i < count) & ~drawn.stopped.all()

    def advance_once(loop):
        i, tokens, (drawn, rest) = loop
        drawn, rest = advance(drawn, rest, keys[i])
        return i + 1, tokens.at[i].set(drawn.token), (drawn, rest)

    tokens = jnp.zeros((MOST_STEPS, len(carry[0].token)), jnp.int32)
    end, tokens, carry = jax.lax.while_loop(
        is_unfinished, advance_once, (jnp.int32(0), tokens, carry)
    )
    # Steps that were not run repeat the last token of each row.
    is_drawn = jnp.arange(MOST_STEPS, dtype=jnp.int32)[:, None] < end
    return jnp.where(is_drawn, tokens, carry[0].token[None]), carry


decoder = lru_cache(maxsize=16)(Decoder)
