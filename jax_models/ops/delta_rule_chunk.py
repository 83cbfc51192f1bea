"""Some steps of the delta rule as products of matrices, in JAX and inside of its kernels."""

import dataclasses
from collections.abc import Iterator
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

LEVELS = 4
CHUNK = 2**LEVELS
"""Steps that are computed as products of matrices. Of 64 float32 loses more than torch's loop."""
LARGEST_EXPONENT = 40.0
"""Of factors: two of them, and a sum over the keys, stay finite in float32."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Some steps as products of matrices, (…, step, features); a step of `matrix_scan`.

    With S₀ before them, the log decay before and behind each step and of all steps, and the scores
    A that step t reads of the steps i < t (r of i ≤ t, where it reads after its step):

        U = (I − A_ab)⁻¹ ((a ⊙ e^before) S₀ᵀ + A_ak V),   U_t = S_{t−1} a_t
        Y = (r ⊙ e^before) S₀ᵀ + A_rb U + A_rk V
        S = S₀ diag(e^all) + Uᵀ (b ⊙ e^behind) + Vᵀ (k ⊙ e^behind)

    Where r reads after its step, r ⊙ w stands for it.
    """

    reads_after: bool
    bounded: bool
    """No exponential of a chunk's log decay overflows, with either sign."""

    def __call__(self, state: Array, *xs: Array) -> tuple[Array, tuple[Array]]:
        """The state after the steps, and their outputs."""
        after, y = across(state, *self.within(*xs))
        return after, (y,)

    def within(self, r, log_w, k, v, a=None, b=None) -> tuple[Array, ...]:
        """What needs no state: U and Y as products with S₀ᵀ and what is added to them."""
        t, i = _step_and_other()
        before, behind = _sums(i < t, log_w), _sums(i > t, log_w)
        fade = jnp.exp(jnp.sum(log_w, axis=-2, keepdims=True))
        start, end = jnp.exp(before), jnp.exp(behind)
        then = r * jnp.exp(log_w) if self.reads_after else r
        decays = [*self._decays(log_w)]

        def scores(readers, writers):
            products = [
                _only(pairs, _product(readers * rows, (writers * columns).mT))
                for pairs, rows, columns in decays
            ]
            return sum(products[1:], start=products[0])

        def scores_of_r(writers):
            result = scores(then, writers)
            if self.reads_after:
                own = jnp.sum(r * writers, axis=-1, keepdims=True)
                result += _only(i == t, jnp.broadcast_to(own, result.shape))
            return result

        of_start, y = then * start, _product(scores_of_r(k), v)
        if a is None or b is None:
            return fade, of_start, y, v, k * end
        inverse = _inverse(scores(a, b))
        u_of_start, u = _product(inverse, a * start), _product(inverse, _product(scores(a, k), v))
        of_b = scores_of_r(b)
        of_start, y = of_start + _product(of_b, u_of_start), y + _product(of_b, u)
        return fade, of_start, y, v, k * end, u_of_start, u, b * end

    def _decays(self, log_w: Array) -> Iterator[tuple[Array, Array, Array]]:
        """Pairs of steps i < t, and two factors of the decay between them, of t's and of i's.

        In a pair of blocks (t in the second of them, i in the first) no log decay is positive and
        no exponential overflows: from the second block's start to t, from i to the first one's end.
        Blocks of 1, 2, 4, … steps make all pairs. Bounded log decays are taken from the chunk's
        start, those of i with the other sign.
        """
        t, i = _step_and_other()
        if self.bounded:
            yield i < t, jnp.exp(_sums(i < t, log_w)), jnp.exp(-_sums(i <= t, log_w))
            return
        for level in range(LEVELS):
            same = t >> level == i >> level
            rows, columns = _sums(same & (i < t), log_w), _sums(same & (i > t), log_w)
            yield _pairs(level), jnp.exp(rows), jnp.exp(columns)


def across(state, fade, of_start, y, v, k, *corrections):
    """The state after the steps, and their outputs, from what needs no state."""
    after = state * fade + _product(v.mT, k)
    if corrections:
        u_of_start, u, b = corrections
        after += _product((_product(u_of_start, state.mT) + u).mT, b)
    return after, _product(of_start, state.mT) + y


def is_bounded(min_log_w: float | None) -> bool:
    """Is it so with a log decay of no less?"""
    return min_log_w is not None and -min_log_w * CHUNK <= LARGEST_EXPONENT


def _step_and_other() -> tuple[Array, Array]:
    """Steps t along the rows of a matrix, i along its columns."""
    t, i = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    return t, i


def _pairs(level: int) -> Array:
    """Of each two blocks of 2^level steps, t in the second and i in the first."""
    t, i = _step_and_other()
    t, i = t >> level, i >> level
    return (t & 1 == 1) & (t == i + 1)


def _inverse(scores: Array) -> Array:
    """(I − scores)⁻¹ of scores that are 0 for i ≥ t: of pairs of blocks, from those of the blocks.

    The powers of the scores, whose sum it is, may be much larger than it.
    """
    t, i = _step_and_other()
    inverse = jnp.broadcast_to((i == t).astype(scores.dtype), scores.shape)
    for level in range(LEVELS):
        pairs = jnp.broadcast_to(_pairs(level), scores.shape)
        between = _product(_product(inverse, jnp.where(pairs, scores, 0)), inverse)
        inverse = jnp.where(pairs, between, inverse)  # libtpu 0.0.42 fails on the sum, on a v6e
    return inverse


def _only(pairs: Array, scores: Array) -> Array:
    """The scores of some pairs of steps, 0 of the others."""
    return jnp.where(jnp.broadcast_to(pairs, scores.shape), scores, 0)


def _sums(which: Array, x: Array) -> Array:
    """Sums over some of a chunk's steps: a product with ones and zeros."""
    return _product(which.astype(x.dtype), x)


_product = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
"""Of matrices; XLA's CPU backend fails on products of arrays of more than eight axes."""
