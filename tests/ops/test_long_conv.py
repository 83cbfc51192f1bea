"""The long convolution, in parallel and step by step, compared with its definitions."""

import functools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_models import ops
from jax_models.ops import empty_long_conv_state, long_conv
from parity_tests.engine.bounds.tolerance import K, assert_same, rms, ulp

METHODS = ("rfft", "twisted")


def signals(batch: int, features: int, time: int):
    """Inputs, filters, skips, and the gradient of the outputs."""
    rng = np.random.default_rng(0)
    v, cotangent = rng.standard_normal((2, batch, features, time))
    return v, rng.standard_normal((features, time)), rng.standard_normal(features), cotangent


def direct(v, h, skip):
    """Computes the sum over the taps of the filter."""
    y = skip[:, None] * v
    for lag in range(v.shape[-1]):
        y[..., lag:] += h[:, lag, None] * v[..., : v.shape[-1] - lag]
    return y


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [*((3, 4, time) for time in (1, 2, 7, 97, 128)), (2, 11, 4099), (40, 11, 300)], ids=str
)
@pytest.mark.parametrize("method", METHODS)
def test_the_fft_is_the_direct_sum(x64, method, sizes):
    """The last two sizes are computed in parts that do not divide the features evenly."""
    v, h, skip, cotangent = signals(*sizes)
    y, pullback = jax.vjp(jax.jit(functools.partial(long_conv, method=method)), v, h, skip)
    assert_same(y, direct(v, h, skip), "the direct sum")
    back = cotangent[..., ::-1]
    v_gradient, h_gradient, skip_gradient = pullback(cotangent)
    assert_same(v_gradient, direct(back, h, skip)[..., ::-1], "gradient of v")
    of_rows = (direct(b, x, 0 * skip)[..., ::-1] for b, x in zip(back, v, strict=True))
    assert_same(h_gradient, sum(of_rows), "gradient of h")
    assert_same(skip_gradient, (v * cotangent).sum(axis=(0, 2)), "gradient of the skip")


def test_bfloat16_inputs_are_transformed_in_float32(x64):
    v, h, skip, _ = (jnp.asarray(x, jnp.bfloat16) for x in signals(3, 4, 512))
    y = long_conv(v, h, skip)
    assert y.dtype == jnp.bfloat16
    wide = direct(*(np.asarray(x, np.float64) for x in (v, h, skip)))
    assert rms(np.asarray(y, np.float64) - wide) <= ulp(jnp.bfloat16) / 2 * rms(wide)


def first_taps(h, length: int):
    return h[:, :length]


def online_step(max_length: int):
    """A compiled step, as a function of the filter, the state, which it donates, and v_t."""

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


@pytest.mark.slow
def test_a_step_copies_no_buffer_and_costs_the_same_at_every_length():
    """The cost would grow with the length if XLA copied the whole inputs or tiles."""
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


SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from concurrent.futures import ThreadPoolExecutor
from jax_models import ops

v = jnp.asarray(np.random.default_rng(0).standard_normal((12, 2, 64, 2048)), jnp.float32)
h = jnp.asarray(np.random.default_rng(1).standard_normal((12, 64, 2048)), jnp.float32)
one = jax.jit(ops.long_conv)
in_one_program = jax.jit(lambda v, h: [ops.long_conv(*pair) for pair in zip(v, h)])
expected = [np.asarray(one(*pair)) for pair in zip(v, h)]
for _ in range(5):
    with ThreadPoolExecutor(12) as pool:
        from_threads = [*pool.map(lambda i: np.asarray(one(v[i], h[i])), range(12))]
    dispatched_at_once = jax.block_until_ready([one(v[i % 12], h[i % 12]) for i in range(20)])
    for results in (in_one_program(v, h), from_threads, dispatched_at_once[:12]):
        np.testing.assert_allclose(results, expected, rtol=1e-3, atol=1e-2)
"""


@pytest.mark.optimized
def test_long_convolutions_at_once_do_not_hang():
    """XLA's CPU backend has hung (PyAutoFit issue 1530), so a process with a timeout runs them."""
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=240)
