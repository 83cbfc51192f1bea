"""The operators on their own: dtypes, many steps and extreme values.

`test_forms.py` compares the forms with the definitions, with masks.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_models import RMSNorm, ops
from jax_models.ops import WKVState, decay, linear_recurrence, wkv
from parity_tests.engine.bounds.tolerance import FLOAT64, K, assert_same, rms, ulp

METHODS = ("sequential", "associative", "definition")
STABLE_METHODS = METHODS[:2]
"""The forms of `wkv` whose derivative is finite for all exponents. JAX derives the definition's."""
KERNEL = "pallas"
"""The interpreted kernel, which is slow for many steps."""


def recurrence_inputs(batch: int, time: int, features: int):
    """Factors of 0, of 1, close to 1 and in between, with inputs and an initial state."""
    rng = np.random.default_rng(0)
    a = rng.uniform(0, 1, (batch, time, features))
    kinds = rng.integers(0, 4, a.shape)
    a = np.choose(kinds, [a, np.where(rng.uniform(size=a.shape) < 0.3, 0.0, a), 1.0, 1 - 1e-7 * a])
    return a, rng.standard_normal(a.shape), rng.standard_normal((batch, features))


def loop(a, b, h0, *, reverse=False):
    """Computes the recurrence in NumPy. `test_derivatives.py` tests its gradients."""
    h, last = np.empty_like(b), h0
    for t in range(a.shape[1])[:: -1 if reverse else 1]:
        last = h[:, t] = a[:, t] * last + b[:, t]
    return h


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        *((method, turn) for method in METHODS for turn in ("real", "complex")),
        (KERNEL, "real"),
    ],
)
@pytest.mark.parametrize(("time", "reverse"), [(1, False), (13, False), (64, True)])
def test_linear_recurrence_is_the_loop(x64, method, kind, time, reverse):
    inputs = recurrence_inputs(3, time, 5)
    if kind == "complex":
        rng = np.random.default_rng(2)
        inputs = [x * np.exp(1j * rng.uniform(-np.pi, np.pi, x.shape)) for x in inputs]
    expected = loop(*inputs, reverse=reverse)
    h, last = jax.jit(partial(linear_recurrence, reverse=reverse, method=method))(*inputs)
    assert_same(h, expected, "h")
    assert_same(last, expected[:, 0 if reverse else -1], "last h")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("method", ["auto", *METHODS, KERNEL])
def test_linear_recurrence_of_bfloat16_is_computed_in_float32(method):
    half = [jnp.asarray(array, jnp.bfloat16) for array in recurrence_inputs(3, 13, 5)]
    h, last = linear_recurrence(*half, method=method)
    expected = linear_recurrence(*(array.astype(jnp.float32) for array in half), method=method)
    assert h.dtype == last.dtype == jnp.float32
    np.testing.assert_array_equal(h, expected[0])
    np.testing.assert_array_equal(last, expected[1])


def test_complex_numbers_meet_others():
    a, b, h0 = (jnp.asarray(x, jnp.float32) for x in recurrence_inputs(2, 5, 3))
    z, half = a.astype(jnp.complex64), b.astype(jnp.bfloat16)
    for x, y, start in ((z, half, h0), (a, b.astype(jnp.complex64), None), (z, b, None)):
        h, last = linear_recurrence(x, y, start)
        assert h.dtype == last.dtype == jnp.complex64
        expected, _ = linear_recurrence(a, y.real.astype(jnp.float32), start)
        np.testing.assert_allclose(h.real, expected, rtol=K * ulp(np.float32), atol=1e-6)
    for gradient, like in zip(
        jax.grad(lambda *x: jnp.sum(linear_recurrence(*x)[0].real), (0, 1))(z, b),
        (z, b),
        strict=True,
    ):
        assert gradient.dtype == like.dtype
    with pytest.raises(TypeError, match="h0:"):
        linear_recurrence(a, b, h0.astype(jnp.complex64))
    with pytest.raises(NotImplementedError, match="'pallas': it supports only real numbers; use"):
        linear_recurrence(z, b, method="pallas")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_linear_recurrence_over_65536_steps(method):
    """Float32 is as exact as the plain loop, although states decay over a million steps."""
    rng = np.random.default_rng(0)
    a = np.float32(1 - 10 ** rng.uniform(-6, -1, (1, 65536, 8)))
    b, h0 = np.float32(rng.standard_normal(a.shape)), np.ones((1, 8), np.float32)
    exact = loop(*(x.astype(np.float64) for x in (a, b, h0)))
    plain = loop(a, b, h0)
    ours, _ = jax.jit(lambda *x: linear_recurrence(*x, method=method))(a, b, h0)
    assert rms(np.asarray(ours) - exact) <= K * rms(plain - exact)


@pytest.mark.slow
def test_memory_of_65536_steps():
    """Forward and backward together need at most 8 times the memory of the inputs."""
    shape = jax.ShapeDtypeStruct((1, 65536, 256), jnp.float32)

    def gradients(a, b, cotangent):
        return jax.vjp(lambda a, b: linear_recurrence(a, b)[0], a, b)[1](cotangent)

    memory = jax.jit(gradients).lower(shape, shape, shape).compile().memory_analysis()
    total = sum(getattr(memory, f"{part}_size_in_bytes") for part in ("argument", "output", "temp"))
    assert total <= 8 * 2 * 4 * 65536 * 256


def test_auto_is_sequential_on_a_cpu_a_kernel_on_a_tpu_and_associative_elsewhere():
    a, v = jnp.full((1, 9, 4), 0.5), jnp.ones(4)
    turned = jax.jit(lambda a: linear_recurrence(1j * a, a)[0].real).trace(a)
    assert "tpu_custom_call" not in turned.lower(lowering_platforms=("tpu",)).as_text()
    for call in (lambda a: linear_recurrence(a, a)[0], lambda a: wkv(a, a, w=v, u=v)[0]):
        lowered = {
            platform: jax.jit(call).trace(a).lower(lowering_platforms=(platform,)).as_text()
            for platform in ("cpu", "tpu", "cuda", "rocm")
        }
        loops = {platform: text.count("stablehlo.while") for platform, text in lowered.items()}
        kernels = {platform: text.count("@tpu_custom_call") for platform, text in lowered.items()}
        assert loops == {"cpu": 1, "tpu": 0, "cuda": 0, "rocm": 0}
        assert kernels == {"cpu": 0, "tpu": 1, "cuda": 0, "rocm": 0}


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("method", [*STABLE_METHODS, KERNEL])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_wkv_of_the_largest_and_the_smallest_exponents(method, dtype):
    """One step outweighs the others, so y is its v even if k + u or the aged sums overflow."""
    with jax.enable_x64(dtype == "float64"):
        largest = float(jnp.finfo(dtype).max)
        k = largest * np.array([-0.99, -0.5, -0.9, -1, -0.2, 0.1, 1, 0.9, -1])
        v = np.arange(9.0)
        lengths, reset = np.array([9, 9, 6, 0]), np.zeros((4, 9), bool)
        reset[1, 3] = True

        @jax.jit
        @partial(jax.grad, argnums=(0, 1, 2, 3), has_aux=True)
        def gradients_and_results(k, v, w, u):
            y, state = wkv(k, v, w=w, u=u, lengths=lengths, reset=reset, method=method)
            active = np.arange(9)[:, None] < lengths[:, None, None]
            return jnp.sum(jnp.where(active, jnp.sin(y), 0)), (y, state)

        k, v = (jnp.asarray(np.broadcast_to(a[:, None], (4, 9, 6)), dtype) for a in (k, v))
        w = jnp.asarray([0, 0, largest, -largest, 1, 0], dtype)
        u = jnp.asarray([0, -largest, 0, 0, largest, 1], dtype)
        gradients, (y, state) = gradients_and_results(k, v, w, u)
        for leaf in jax.tree.leaves((gradients, y[0], y[1], y[2, :6], state)):
            assert np.isfinite(leaf).all()
        expected = {0: [0, 1, 1, 1, 4, 5, 6, 6, 6], 1: [0, 0, 1, 1, 1, 4, 5, 6, 6]}
        for feature, values in expected.items():
            np.testing.assert_array_equal(y[0, :, feature], values)
        np.testing.assert_array_equal(y[1, 3:, 0], [3, 4, 5, 6, 6, 6])
        np.testing.assert_array_equal(y[0, :7, 4], v[0, :7, 4])
        empty = jax.tree.map(lambda s: s[3, 0].astype(float), state)
        assert empty == WKVState(0, 0, float(jnp.asarray(-1e38, state.max.dtype)))


@pytest.mark.slow
@pytest.mark.parametrize("method", STABLE_METHODS)
def test_wkv_gradients_stay_small_over_4000_growing_steps(method):
    """Float32 has exponents of 10⁷ only to ±1. Gradients must not multiply such errors."""
    rng = np.random.default_rng(0)
    k, v = (np.float32(rng.uniform(-1, 1, (1, 4000, 4))) for _ in range(2))
    w, u = np.full(4, -9999.7, np.float32), np.zeros(4, np.float32)
    gradients = jax.jit(
        jax.grad(lambda k, v: jnp.sum(jnp.sin(wkv(k, v, w=w, u=u, method=method)[0])), (0, 1))
    )(k, v)
    assert np.abs(gradients[0]).max() < 1e2
    assert np.abs(gradients[1]).max() <= 4000 * K, "the first v reaches every y, by its share ≤ 1"


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("method", [*STABLE_METHODS, KERNEL])
def test_a_step_that_outweighs_all_keeps_its_whole_gradient(method):
    """Each y is exactly the first v, so the gradients add up to 33 for every decay w."""
    k, v = jnp.full((1, 33, 8), -200.0).at[:, 0].set(200.3), jnp.ones((1, 33, 8))

    def total(v, log_w):
        return jnp.sum(wkv(k, v, w=jnp.exp(log_w), u=jnp.zeros(8), method=method)[0])

    gradient = jax.jit(jax.grad(total))(v, jnp.linspace(-3, 0, 8))
    np.testing.assert_allclose(gradient[0, 0], 33, rtol=K * ulp(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_wkv_in_float32_is_exact_up_to_rounding(method):
    rng = np.random.default_rng(0)
    k, v = np.float32(rng.standard_normal((2, 2, 400, 8)))
    w, u = np.float32(rng.uniform(0.01, 2, 8)), np.float32(rng.standard_normal(8))
    with jax.enable_x64(True):
        k64, v64, w64, u64 = map(np.float64, (k, v, w, u))
        exact, _ = wkv(k64, v64, w=w64, u=u64, method="definition")
    y, _ = wkv(k, v, w=w, u=u, method=method)
    assert rms(np.asarray(y) - np.asarray(exact)) <= K * ulp(np.float32) * rms(np.asarray(exact))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_decay_has_finite_gradients_and_exact_ones_inside(x64, dtype):
    epsilon = np.finfo(dtype).eps
    a = np.array([0, np.finfo(dtype).tiny, epsilon, 0.3, 0.9, 1 - 1e-3, 1 - 1e-6, 1 - epsilon, 1])
    exponent = np.array([0, np.finfo(dtype).tiny, 1e-3, 0.5, 1.0, 4.0, 8.0])
    a, exponent = (x.astype(dtype).ravel() for x in np.meshgrid(a, exponent))
    inside = (a > 2 * epsilon) & (a < 1 - 2 * epsilon) & (exponent >= 0.5)
    log = np.log(a[inside].astype(np.float64))
    slope = exponent[inside] * np.exp((exponent[inside] - 1) * log)
    ratio = np.exp(exponent[inside] * log) / np.sqrt(-np.expm1(2 * exponent[inside] * log))
    tolerance = FLOAT64 if dtype == np.float64 else 100 * epsilon
    for output, expected in enumerate((slope, -ratio * slope)):
        outputs, pullback = jax.vjp(decay, a, exponent)
        cotangents = [jnp.full_like(y, i == output) for i, y in enumerate(outputs)]
        for gradient in pullback(tuple(cotangents)):
            assert gradient.dtype == dtype
            assert np.isfinite(gradient).all()
        np.testing.assert_allclose(pullback(tuple(cotangents))[0][inside], expected, rtol=tolerance)


def test_decay_outside_is_the_nearest_end():
    exponent = jnp.full(4, 2.0)
    outside, ends = jnp.array([-0.5, 1.5, -1e-9, 1 + 1e-6]), jnp.array([0.0, 1.0, 0.0, 1.0])
    for ours, expected in zip(decay(outside, exponent), decay(ends, exponent), strict=True):
        np.testing.assert_array_equal(ours, expected)
    np.testing.assert_array_equal(decay(jnp.zeros(2), jnp.array([0.0, 0.3]))[1], [0, 1])
    gradient = jax.grad(lambda a: jnp.sum(decay(a, exponent)[1]))(outside)
    assert np.isfinite(gradient).all()
    assert (gradient[np.array([1, 3])] < 0).all(), "nothing leads back from beyond 1"


@pytest.mark.parametrize("function", [ops.l2_normalize, RMSNorm(8, rngs=nnx.Rngs(0))])
def test_zero_vectors_have_finite_values_and_gradients(function):
    """A nonzero vector stands beside them. The registry tests the norms of its layers."""
    y, pullback = jax.vjp(function, jnp.zeros((3, 8)).at[1].set(1))
    assert jnp.isfinite(pullback(jnp.ones_like(y))[0]).all()
    np.testing.assert_array_equal(y[0], 0)


def test_l2_normalize_is_the_equation(x64):
    x = np.random.default_rng(0).standard_normal((3, 4, 8))
    expected = x / np.sqrt((x**2).sum(-1, keepdims=True) + 0.5)
    np.testing.assert_allclose(ops.l2_normalize(x, epsilon=0.5), expected, rtol=1e-14)


def test_l2_normalize_sums_in_float32():
    x = jnp.full((1, 4096), 300, "float16")  # the sum of squares overflows in float16
    y = ops.l2_normalize(x)
    assert y.dtype == jnp.float16
    np.testing.assert_allclose(y, 1 / 64, rtol=1e-3)
