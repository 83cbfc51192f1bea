"""The form "chunked" of the delta rule, which computes 16 steps at a time by matrix products."""

import dataclasses
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_models.ops.affine import einsum, product
from jax_models.ops.delta.calls import DeltaRule, GatedDeltaRule, Results
from jax_models.ops.delta.inverse import inverse_of_steps, pairs, step_and_other
from jax_models.ops.forms import refusal_of_symbolic

LEVELS = 4
CHUNK = 2**LEVELS
"""The number of steps that are computed by matrix products. With 64, float32 would lose more
accuracy than torch's loop.
"""
SEGMENT = 8
"""The number of chunks between two states that the backward pass stores. It recomputes the others.
"""
LARGEST_EXPONENT = 40.0
"""The largest exponent of a factor, for which products of two factors, summed over keys, are
finite.
"""


def refusal(call: DeltaRule | GatedDeltaRule) -> str | None:
    """Returns why chunks do not support the call, or None if they do."""
    return refusal_of_symbolic(call.steps.k.shape[1])


def pays(call: DeltaRule, platform: str, differentiated: bool) -> bool:
    """Whether chunks are likely to be faster than one step after the other."""
    return call.steps.k.shape[1] >= CHUNK


def run(call: DeltaRule) -> Results:
    """Computes the steps of a chunk by matrix products, for up to `SEGMENT` chunks at once."""
    bounded = -call.min_log_w * CHUNK <= LARGEST_EXPONENT and call.reset is None
    chunk = Chunk(reads_after=call.u is None, bounded=bounded)
    time = call.steps.k.shape[1]
    count = min(SEGMENT, -(-time // CHUNK))

    def segment(state, xs):
        return lax.scan(lambda state, x: across(state, *x), state, chunk.within(*xs))

    by_chunk = jax.tree.map(partial(_by_chunk, count), call.without_reset().steps)
    last, y = lax.scan(jax.checkpoint(segment, prevent_cse=False), call.state, by_chunk)
    # From (segments, chunks, batch, heads, step, features) to (batch, time, heads, features).
    y = jnp.moveaxis(y, (2, 4), (0, 3))
    return call.with_bonus(y.reshape(y.shape[0], -1, *y.shape[4:])[:, :time]), last


def _by_chunk(count: int, x: Array) -> Array:
    """From (batch, time, heads, features) to (segments, chunks, batch, heads, step, features).

    Zeros fill the last segment.
    """
    batch, time, *features = x.shape
    x = jnp.pad(x, [(0, 0), (0, -time % (count * CHUNK)), (0, 0), (0, 0)])
    return jnp.moveaxis(x.reshape(batch, -1, count, CHUNK, *features), (0, 3), (2, 4))


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Computes a chunk, (…, step, features), by matrix products.

    S₀ is the state before the chunk. `start`, `end` and `fade` are products of decays: over the
    steps before each step, over the steps after it, and over all steps. The scores A say how
    strongly step t reads the steps i < t. If r reads the state after its step, its scores also
    include i = t:

        U = (I − A_ab)⁻¹ ((a ⊙ start) S₀ᵀ + A_ak V),   U_t = S_{t−1} a_t
        Y = (r ⊙ start) S₀ᵀ + A_rb U + A_rk V
        S = S₀ diag(fade) + Uᵀ (b ⊙ end) + Vᵀ (k ⊙ end)

    If r reads the state after its step, r ⊙ w takes the place of r.
    """

    reads_after: bool
    bounded: bool
    """Whether no exponential of a chunk's log decay, with either sign, can overflow."""

    def within(self, r, log_w, k, v, a=None, b=None) -> tuple[Array, ...]:
        """Computes all that does not need the state: factors of S₀ᵀ in U and Y, and added terms."""
        decays = (_FactoredDecays if self.bounded else _BlockwiseDecays)(log_w)
        scores_of_r = partial(decays.scores, r, reads_after=self.reads_after)
        r_from_start, y = decays.from_start(r, self.reads_after), product(scores_of_r(k), v)
        if a is None or b is None:
            return decays.fade, r_from_start, y, v, decays.to_end(k)
        inverse = inverse_of_steps(decays.scores(a, b, reads_after=False))
        u_from_start = product(inverse, decays.from_start(a, reads_after=False))
        u = product(inverse, product(decays.scores(a, k, reads_after=False), v))
        of_b = scores_of_r(b)
        r_from_start, y = r_from_start + product(of_b, u_from_start), y + product(of_b, u)
        return decays.fade, r_from_start, y, v, decays.to_end(k), u_from_start, u, decays.to_end(b)


class _Decays(Protocol):
    """The decays of a chunk, applied to the keys that read and write its states."""

    fade: Array
    """The product of the decays of all steps."""

    def from_start(self, readers: Array, reads_after: bool) -> Array:
        """Multiplies the keys that read S₀ by the decays from the start of the chunk."""
        ...

    def to_end(self, writers: Array) -> Array:
        """Multiplies the keys that write to S by the decays to the end of the chunk."""
        ...

    def scores(self, readers: Array, writers: Array, reads_after: bool) -> Array:
        """Returns how strongly each step t reads the values that steps i < t (or i ≤ t) wrote."""
        ...


class _FactoredDecays(_Decays):
    """Factors the decay between the steps i and t into e^total_t · e^−total_i.

    `total` is the sum of the log decays up to a step. No exponential overflows if the log decays
    are bounded.
    """

    def __init__(self, log_w: Array) -> None:
        t, i = step_and_other(CHUNK)
        total = _sums(i <= t, log_w)
        self.before, self.after = jnp.exp(total - log_w), jnp.exp(total)
        self.inverse = jnp.exp(-total)
        self.fade = jnp.exp(jnp.sum(log_w, axis=-2, keepdims=True))

    def from_start(self, readers, reads_after):
        return readers * (self.after if reads_after else self.before)

    def to_end(self, writers):
        return writers * (self.inverse * self.fade)

    def scores(self, readers, writers, reads_after):
        t, i = step_and_other(CHUNK)
        readers, writers = self.from_start(readers, reads_after), writers * self.inverse
        return _only(i <= t if reads_after else i < t, _scores(readers, writers))


class _BlockwiseDecays(_Decays):
    """Computes the decays for pairs of blocks of steps, with t in the second and i in the first.

    From the start of the second block to t, and from i to the end of the first block, no log decay
    is positive, so no exponential overflows. Blocks of 1, 2, 4, … steps cover all pairs of steps.
    """

    def __init__(self, log_w: Array) -> None:
        t, i = step_and_other(CHUNK)
        self.w = jnp.exp(log_w)
        self.fade = jnp.exp(jnp.sum(log_w, axis=-2, keepdims=True))
        self.start, self.end = jnp.exp(_sums(i < t, log_w)), jnp.exp(_sums(i > t, log_w))
        self.blocks = []
        for level in range(LEVELS):
            same = t >> level == i >> level
            rows, columns = _sums(same & (i < t), log_w), _sums(same & (i > t), log_w)
            self.blocks.append((pairs(CHUNK, level), jnp.exp(rows), jnp.exp(columns)))

    def from_start(self, readers, reads_after):
        return (readers * self.w if reads_after else readers) * self.start

    def to_end(self, writers):
        return writers * self.end

    def scores(self, readers, writers, reads_after):
        then = readers * self.w if reads_after else readers
        products = [
            _only(among, _scores(then * rows, writers * columns))
            for among, rows, columns in self.blocks
        ]
        scores = sum(products[1:], start=products[0])
        if not reads_after:
            return scores
        t, i = step_and_other(CHUNK)
        own = jnp.sum(readers * writers, axis=-1, keepdims=True)
        return scores + _only(i == t, jnp.broadcast_to(own, scores.shape))


def across(state, fade, of_start, y, v, k, *corrections):
    """Returns the state after the steps, and their outputs, given the results of `Chunk.within`."""
    after = state * fade + einsum("...tv,...tk->...vk", v, k)
    if corrections:
        u_from_start, u, b = corrections
        u += einsum("...tk,...vk->...tv", u_from_start, state)
        after += einsum("...tv,...tk->...vk", u, b)
    return after, einsum("...tk,...vk->...tv", of_start, state) + y


def _scores(readers: Array, writers: Array) -> Array:
    """The scores of each step's reader and each step's writer."""
    return einsum("...tk,...ik->...ti", readers, writers)


def _only(pairs: Array, scores: Array) -> Array:
    """Keeps the scores of some pairs of steps, and sets the others to 0."""
    return jnp.where(jnp.broadcast_to(pairs, scores.shape), scores, 0)


def _sums(which: Array, x: Array) -> Array:
    """Sums over some of a chunk's steps, as a product with a matrix of ones and zeros."""
    return product(which.astype(x.dtype), x)
