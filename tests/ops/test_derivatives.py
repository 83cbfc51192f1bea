"""Forward mode, reverse mode and second derivatives of the operators that bring their own."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_models import ops
from parity_tests.engine.bounds.tolerance import assert_same

BATCH, TIME, FEATURES, MAX_LENGTH = 2, 6, 3, 20
LENGTHS = jnp.array([TIME, 4])
REAL = (jnp.arange(TIME)[None] < LENGTHS[:, None])[..., None]
RESET = jnp.zeros((BATCH, TIME), bool).at[0, 2].set(True)


def draw(*shape: int, seed: int = 0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape)


def linear_recurrence(a, b, h0, **options):
    h, last = ops.linear_recurrence(a, b, h0, lengths=LENGTHS, **options)
    return jnp.where(REAL, h, 0), last


def of_complex_numbers(a, b, h0, **options):
    """Of pairs of real numbers, the last axis."""
    h, last = linear_recurrence(
        *(jax.lax.complex(x[..., 0], x[..., 1]) for x in (a, b, h0)), **options
    )
    return h.real, h.imag, last.real, last.imag


def modal_conv(v, modes, poles, residues, skip, **options):
    given = {"poles": poles, "residues": residues, "skip": skip}
    y, state = ops.modal_conv(v, ops.ModalConvState(modes), **given, lengths=LENGTHS, **options)
    return jnp.where(REAL, y, 0), state


def wkv(k, v, w, u, num, den, largest, **options):
    state = ops.WKVState(num, den, largest)
    y, last = ops.wkv(k, v, state, w=w, u=u, lengths=LENGTHS, reset=RESET, **options)
    return jnp.where(REAL, y, 0), last


def delta_rule(r, log_w, k, v, a, b, state, **options):
    y, last = ops.delta_rule(r, log_w, k, v, a, b, state, lengths=LENGTHS, reset=RESET, **options)
    return jnp.where(REAL[..., None], y, 0), last


def local_attention(q, k, v, keys, values):
    """After five steps and after one; a document ends."""
    state = ops.LocalAttentionState(jnp.array([5, 1]), keys, values)
    y, last = ops.local_attention(q, k, v, state, lengths=LENGTHS, reset=RESET)
    return jnp.where(REAL[..., None], y, 0), last.keys, last.values


def online_conv(v, inputs, taps):
    """A step that ends a block, after all inputs but the last of that block."""
    options = {"taps": lambda h, length: h[:, :length], "max_length": MAX_LENGTH}
    state = ops.long_conv_state(inputs, params=taps, **options)
    y, state = ops.online_conv(v, state, params=taps, **options)
    return y, state.inputs, state.tiles, state.ahead


def sequences(count: int):
    return [draw(BATCH, TIME, FEATURES, seed=seed) for seed in range(count)]


def rows(count: int):
    return [draw(BATCH, FEATURES, seed=seed) for seed in range(count)]


OF_RECURRENCE = [1 / (1 + np.exp(draw(BATCH, TIME, FEATURES))), *sequences(2)[1:], *rows(1)]
OF_COMPLEX_NUMBERS = [
    0.5 * draw(BATCH, TIME, FEATURES, 2),
    draw(BATCH, TIME, FEATURES, 2, seed=1),
    draw(BATCH, FEATURES, 2),
]
OF_MODES = [
    draw(BATCH, TIME, FEATURES),
    draw(BATCH, FEATURES, 2, 2),
    *(0.5 * draw(FEATURES, 2, 2, seed=seed) for seed in (1, 2)),
    draw(FEATURES),
]
OF_WKV = [
    *(3 * x for x in sequences(2)),
    np.exp(draw(FEATURES)),
    draw(FEATURES, seed=1),
    rows(1)[0],
    1 + np.abs(rows(2)[1]),
    rows(3)[2],
]
OF_CONVOLUTION = [draw(BATCH, FEATURES, TIME), draw(FEATURES, TIME)]
OF_DELTA_RULE = [
    draw(BATCH, TIME, 2, 3),
    -np.exp(draw(BATCH, TIME, 2, 3, seed=1)),
    *(draw(BATCH, TIME, 2, size, seed=2) for size in (3, 4)),
    *(0.5 * draw(BATCH, TIME, 2, 3, seed=seed) for seed in (3, 4)),
    draw(BATCH, 2, 4, 3),
]
OF_ATTENTION = [
    draw(BATCH, TIME, 2, 4),
    *(draw(BATCH, TIME, 1, 4, seed=seed) for seed in (1, 2)),
    *(draw(BATCH, 3, 1, 4, seed=seed) for seed in (3, 4)),
]
OPERATORS = {
    "local attention": (local_attention, OF_ATTENTION),
    **{
        f"delta rule, {method}": (partial(delta_rule, method=method), OF_DELTA_RULE)
        for method in ("sequential", "chunked", "pallas_interpreted")
    },
    **{
        f"linear recurrence, {method}{', reversed' * reverse}": (
            partial(linear_recurrence, method=method, reverse=reverse),
            OF_RECURRENCE,
        )
        for method in ("auto", "associative", "chunked", "pallas_interpreted")
        for reverse in (False, True)
    },
    **{
        f"linear recurrence of complex numbers, {method}": (
            partial(of_complex_numbers, method=method),
            OF_COMPLEX_NUMBERS,
        )
        for method in ("auto", "associative", "chunked")
    },
    "modal convolution": (modal_conv, OF_MODES),
    "modal convolution of documents": (partial(modal_conv, reset=RESET), OF_MODES),
    **{
        f"WKV, {method}": (partial(wkv, method=method), OF_WKV)
        for method in ("auto", "associative")
    },
    **{
        f"long convolution, {method}": (partial(ops.long_conv, method=method), OF_CONVOLUTION)
        for method in ("rfft", "twisted")
    },
    "online convolution": (
        online_conv,
        [draw(BATCH, FEATURES, 1), draw(BATCH, FEATURES, 15), draw(FEATURES, MAX_LENGTH)],
    ),
}


def inner(x, y):
    return sum(map(jnp.vdot, jax.tree.leaves(x), jax.tree.leaves(y)))


def alike(tree, seed: int):
    return jax.tree.map(lambda leaf: draw(*leaf.shape, seed=seed), tree)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
def test_forward_mode_is_the_slope_and_reverse_mode_its_transpose(x64, name):
    operator, args = OPERATORS[name]
    direction = alike(args, 5)

    @jax.jit
    def moved(by):
        return operator(*jax.tree.map(lambda x, d: x + by * d, args, direction))

    results, tangents = jax.jit(lambda: jax.jvp(operator, args, direction))()
    slope = jax.tree.map(lambda a, b: (a - b) / 2e-5, moved(1e-5), moved(-1e-5))
    for a, b in zip(jax.tree.leaves(tangents), jax.tree.leaves(slope), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)
    cotangents = alike(results, 6)
    gradients = jax.jit(lambda: jax.vjp(operator, *args)[1](cotangents))()
    assert_same(inner(gradients, direction), inner(cotangents, tangents), name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "local attention",
        "linear recurrence, auto",
        "linear recurrence of complex numbers, auto",
        "modal convolution",
        "WKV, auto",
        "long convolution, twisted",
    ],
)
def test_hessians_are_the_same_in_both_modes(x64, name):
    operator, (first, *others) = OPERATORS[name]

    def loss(first):
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(operator(first, *others)))

    forward_over_reverse = jax.jit(jax.hessian(loss))(first)
    reverse_over_reverse = jax.jit(jax.jacrev(jax.grad(loss)))(first)
    assert_same(forward_over_reverse, reverse_over_reverse, name)
