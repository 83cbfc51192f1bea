"""Some steps of the delta rule as products of matrices, in JAX and inside of its kernels."""

import dataclasses
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

LEVELS = 4
CHUNK = 2**LEVELS
"""Steps that are computed as products of matrices. Of 64 float32 loses more than torch's loop."""
LARGEST_EXPONENT = 40.0
"""The largest exponent of a factor. The products of two, summed over the keys, stay finite."""


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
        """The part without the state: U and Y as products with S₀ᵀ, and the added terms."""
        decays = (_FactoredDecays if self.bounded else _BlockwiseDecays)(log_w)
        scores_of_r = partial(decays.scores, r, reads_after=self.reads_after)
        of_start, y = decays.of_start(r, self.reads_after), _product(scores_of_r(k), v)
        if a is None or b is None:
            return decays.fade, of_start, y, v, decays.to_end(k)
        inverse = _inverse(decays.scores(a, b, reads_after=False))
        u_of_start = _product(inverse, decays.of_start(a, reads_after=False))
        u = _product(inverse, _product(decays.scores(a, k, reads_after=False), v))
        of_b = scores_of_r(b)
        of_start, y = of_start + _product(of_b, u_of_start), y + _product(of_b, u)
        return decays.fade, of_start, y, v, decays.to_end(k), u_of_start, u, decays.to_end(b)


class _Decays(Protocol):
    """The decays of a chunk, applied to the keys that read and write its states."""

    fade: Array
    """The decay of all steps, e^all."""

    def of_start(self, readers: Array, reads_after: bool) -> Array:
        """The readers of the chunk's first state: times e^before."""
        ...

    def to_end(self, writers: Array) -> Array:
        """The writers of the chunk's last state: times e^behind."""
        ...

    def scores(self, readers: Array, writers: Array, reads_after: bool) -> Array:
        """How strongly each step t reads the values that the steps i < t (or i ≤ t) wrote."""
        ...


class _FactoredDecays(_Decays):
    """With e^total of the steps up to each one: between i and t it is e^total_t · e^−total_i.

    No exponential overflows where the log decays are bounded.
    """

    def __init__(self, log_w: Array) -> None:
        t, i = _step_and_other()
        total = _sums(i <= t, log_w)
        self.before, self.after = jnp.exp(total - log_w), jnp.exp(total)
        self.inverse = jnp.exp(-total)
        self.fade = jnp.exp(jnp.sum(log_w, axis=-2, keepdims=True))

    def of_start(self, readers, reads_after):
        return readers * (self.after if reads_after else self.before)

    def to_end(self, writers):
        return writers * (self.inverse * self.fade)

    def scores(self, readers, writers, reads_after):
        t, i = _step_and_other()
        readers, writers = self.of_start(readers, reads_after), writers * self.inverse
        return _only(i <= t if reads_after else i < t, _scores(readers, writers))


class _BlockwiseDecays(_Decays):
    """In pairs of blocks of steps, t in the second and i in the first of them.

    From the second block's start to t, and from i to the first one's end, no log decay is positive
    and no exponential overflows. Blocks of 1, 2, 4, … steps make all pairs.
    """

    def __init__(self, log_w: Array) -> None:
        t, i = _step_and_other()
        self.w = jnp.exp(log_w)
        self.fade = jnp.exp(jnp.sum(log_w, axis=-2, keepdims=True))
        self.start, self.end = jnp.exp(_sums(i < t, log_w)), jnp.exp(_sums(i > t, log_w))
        self.blocks = []
        for level in range(LEVELS):
            same = t >> level == i >> level
            rows, columns = _sums(same & (i < t), log_w), _sums(same & (i > t), log_w)
            self.blocks.append((_pairs(level), jnp.exp(rows), jnp.exp(columns)))

    def of_start(self, readers, reads_after):
        return (readers * self.w if reads_after else readers) * self.start

    def to_end(self, writers):
        return writers * self.end

    def scores(self, readers, writers, reads_after):
        then = readers * self.w if reads_after else readers
        products = [
            _only(pairs, _scores(then * rows, writers * columns))
            for pairs, rows, columns in self.blocks
        ]
        scores = sum(products[1:], start=products[0])
        if not reads_after:
            return scores
        t, i = _step_and_other()
        own = jnp.sum(readers * writers, axis=-1, keepdims=True)
        return scores + _only(i == t, jnp.broadcast_to(own, scores.shape))


def across(state, fade, of_start, y, v, k, *corrections):
    """The state after the steps, and their outputs, from what needs no state."""
    after = state * fade + _einsum("...tv,...tk->...vk", v, k)
    if corrections:
        u_of_start, u, b = corrections
        u += _einsum("...tk,...vk->...tv", u_of_start, state)
        after += _einsum("...tv,...tk->...vk", u, b)
    return after, _einsum("...tk,...vk->...tv", of_start, state) + y


def is_bounded(min_log_w: float | None) -> bool:
    """Can the decays of a chunk be factored, if no log decay is below this?"""
    return min_log_w is not None and -min_log_w * CHUNK <= LARGEST_EXPONENT


def _step_and_other() -> tuple[Array, Array]:
    """Steps t along the rows of a matrix, i along its columns."""
    t, i = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    return t, i


def _pairs(level: int) -> Array:
    """Marks t in the second and i in the first of each two blocks of 2^level steps."""
    t, i = _step_and_other()
    t, i = t >> level, i >> level
    return (t & 1 == 1) & (t == i + 1)


@jax.custom_jvp
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


@_inverse.defjvp
def _inverse_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """Its derivative, (I − A)⁻¹ dA (I − A)⁻¹."""
    (scores,), (d_scores,) = primals, tangents
    inverse = _inverse(scores)
    return inverse, _product(_product(inverse, d_scores), inverse)


def _scores(readers: Array, writers: Array) -> Array:
    """The scores of each step's reader and each step's writer."""
    return _einsum("...tk,...ik->...ti", readers, writers)


def _only(pairs: Array, scores: Array) -> Array:
    """The scores of some pairs of steps, 0 of the others."""
    return jnp.where(jnp.broadcast_to(pairs, scores.shape), scores, 0)


def _sums(which: Array, x: Array) -> Array:
    """Sums over some of a chunk's steps: a product with ones and zeros."""
    return _product(which.astype(x.dtype), x)


_product = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
"""A product of matrices. XLA's CPU backend fails on arrays of more than eight axes."""
_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
"""For products with a transposed array, so that the backward pass keeps no transposed one."""
