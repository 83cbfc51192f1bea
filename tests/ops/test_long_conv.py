"""The long convolution, whole and step by step, against its definitions."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_models import ops
from jax_models.ops import CausalConv1DState, causal_conv, empty_long_conv_state, long_conv
from parity_tests.engine.bounds.tolerance import K, assert_same, rms, ulp

METHODS = ("auto", "rfft", "twisted")


def signals(batch: int, features: int, time: int):
    """Inputs, filters, skips, and the gradient of the outputs."""
    rng = np.random.default_rng(0)
    v, cotangent = rng.standard_normal((2, batch, features, time))
    return v, rng.standard_normal((features, time)), rng.standard_normal(features), cotangent


def direct(v, h, skip):
    """The sum, term by term of the filter."""
    y = skip[:, None] * v
    for lag in range(v.shape[-1]):
        y[..., lag:] += h[:, lag, None] * v[..., : v.shape[-1] - lag]
    return y


@pytest.mark.slow
@pytest.mark.parametrize("time", [1, 2, 7, 97, 128])
@pytest.mark.parametrize("method", METHODS)
def test_the_fft_is_the_direct_sum(x64, method, time):
    v, h, skip, cotangent = signals(3, 4, time)
    y, pullback = jax.vjp(functools.partial(long_conv, method=method), v, h, skip)
    assert_same(y, direct(v, h, skip), "the direct sum")
    back = cotangent[..., ::-1]
    v_gradient, h_gradient, skip_gradient = pullback(cotangent)
    assert_same(v_gradient, direct(back, h, skip)[..., ::-1], "gradient of v")
    of_rows = (direct(b, x, np.zeros(4))[..., ::-1] for b, x in zip(back, v, strict=True))
    assert_same(h_gradient, sum(of_rows), "gradient of h")
    assert_same(skip_gradient, (v * cotangent).sum(axis=(0, 2)), "gradient of the skip")


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 11, 4099), (2, 11, 5000), (40, 11, 300)], ids=str)
def test_parts_that_do_not_divide_the_features(x64, sizes):
    """Side by side, and for many short rows in turn."""
    v, h, skip, cotangent = signals(*sizes)
    results = []
    for method in ("rfft", "twisted"):
        y, pullback = jax.vjp(jax.jit(functools.partial(long_conv, method=method)), v, h, skip)
        results.append((y, *pullback(cotangent)))
    for a, b in zip(*results, strict=True):
        assert_same(a, b, "the methods")
    assert_same(results[0][0][0], direct(v, h, skip)[0], "the direct sum")


def test_bfloat16_inputs_are_transformed_in_float32(x64):
    v, h, skip, _ = (jnp.asarray(x, jnp.bfloat16) for x in signals(3, 4, 512))
    y = long_conv(v, h, skip)
    assert y.dtype == jnp.bfloat16
    wide = direct(*(np.asarray(x, np.float64) for x in (v, h, skip)))
    assert rms(np.asarray(y, np.float64) - wide) <= ulp(jnp.bfloat16) / 2 * rms(wide)


def test_the_short_convolution_is_a_padded_cross_correlation(x64):
    rng = np.random.default_rng(0)
    x, kernel = rng.standard_normal((2, 9, 3)), rng.standard_normal((4, 3))
    state = CausalConv1DState(np.zeros((2, 3, 3)))
    y, _ = causal_conv(jnp.asarray(x), state, kernel=jnp.asarray(kernel), bias=jnp.zeros(3))
    for row, feature in np.ndindex(2, 3):
        padded = np.pad(x[row, :, feature], (3, 0))
        assert_same(y[row, :, feature], np.correlate(padded, kernel[:, feature]), "correlation")


def first_taps(h, length: int):
    return h[:, :length]


def online_step(max_length: int):
    """One step as a compiled function of the filter, the state, which it uses up, and v_t."""

    def step(h, state, v):
        return ops.online_conv(
            v[..., None], state, taps=first_taps, params=h, max_length=max_length
        )

    return jax.jit(step, donate_argnums=1)


@pytest.mark.slow
@pytest.mark.parametrize("max_length", [5, 16, 97, 160])
def test_steps_are_the_whole_convolution_and_compile_once(x64, max_length):
    v, h, *_ = signals(2, 3, max_length)
    y, step = long_conv(jnp.asarray(v), jnp.asarray(h)), online_step(max_length)
    state = empty_long_conv_state(2, 3, max_length, jnp.float64)
    for t in range(max_length):
        y_t, state = step(h, state, v[..., t])
        assert_same(y_t[..., 0], y[..., t], f"step {t}")
    assert step._cache_size() == 1
    y_t, _ = step(h, state, v[..., 0])
    assert np.isnan(y_t).all(), "there is no step beyond max_length"


def test_steps_in_a_scan_of_rows_at_different_positions(x64):
    max_length, lengths = 90, np.array([37, 4, 20])
    v, h, _, _ = signals(3, 2, max_length)
    options = {"taps": first_taps, "params": jnp.asarray(h), "max_length": max_length}
    before = jnp.asarray(v[..., :37])
    y_before = long_conv(before, jnp.asarray(h[:, :37]))
    state = ops.long_conv_state(before, lengths=jnp.asarray(lengths), **options)
    rest = np.stack([np.take(v[i], np.arange(n, n + 50), axis=1) for i, n in enumerate(lengths)])

    @jax.jit
    def scan(state, rest):
        def step(state, v_t):
            y, state = ops.online_conv(v_t[..., None], state, **options)
            return state, y[..., 0]

        return jax.lax.scan(step, state, jnp.moveaxis(rest, 2, 0))[1]

    ys = np.moveaxis(scan(state, rest), 0, 2)
    for row, length in enumerate(lengths):
        whole = direct(v[row : row + 1], h, np.zeros(2))[0]
        assert_same(y_before[row, :, :length], whole[:, :length], "before")
        assert_same(ys[row], whole[:, length : length + 50], "after")


@pytest.mark.slow
def test_a_step_copies_no_buffer_and_costs_the_same_at_every_length():
    """What spoils the growth with the length is XLA copying the inputs or the tiles whole."""
    operations = []
    for max_length in (1024, 8192):
        state = jax.eval_shape(functools.partial(empty_long_conv_state, 1, 8, max_length))
        arguments = jnp.zeros((8, max_length)), state, jnp.zeros((1, 8))
        text = online_step(max_length).lower(*arguments).compile().as_text()
        sizes = "|".join(str(buffer.shape[1]) for buffer in (state.inputs, state.tiles))
        assert f"[1,{state.inputs.shape[1]},8]" in text
        assert not re.findall(rf"\[1,(?:{sizes}),8\]\S* copy\(", text)
        entry = text[text.index("ENTRY") :]
        operations.append(len(re.findall(r" fft\(", entry)))
    assert operations == [0, 0], "a transform is computed at every step"


def test_float32_steps_err_as_the_whole_does():
    v, h, _, _ = signals(2, 3, 300)
    exact = direct(v, h, np.zeros(3))
    step, state = online_step(300), empty_long_conv_state(2, 3, 300)
    v, h = jnp.asarray(v, jnp.float32), jnp.asarray(h, jnp.float32)
    ys = []
    for t in range(300):
        y_t, state = step(h, state, v[..., t])
        ys.append(np.asarray(y_t[..., 0]))
    error = rms(np.stack(ys, axis=-1) - exact)
    assert error <= K * max(rms(np.asarray(long_conv(v, h)) - exact), ulp(np.float32) * rms(exact))


@pytest.mark.parametrize(("platform", "method"), [("cpu", "twisted"), ("tpu", "rfft")])
def test_auto_chooses_by_platform(platform, method):
    arguments = jnp.zeros((2, 3, 8)), jnp.zeros((3, 8))

    def transforms(**options):
        traced = jax.jit(functools.partial(long_conv, **options)).trace(*arguments)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        return re.findall(r"type = (\w+)", text)

    assert transforms() == transforms(method=method) != []
