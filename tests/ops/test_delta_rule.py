"""The delta rule on its own: all its forms, masks, extreme values, derivatives and memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_models.ops import delta_rule
from parity_tests.engine.bounds.tolerance import K, assert_same, floor, rms

METHODS = ("sequential", "chunked", "auto")
BATCH, HEADS, KEY, VALUE = 3, 2, 5, 6
LEAST_LOG_DECAY = -0.6


def inputs(kind: str, time: int) -> tuple[dict, dict]:
    """Named arrays of a layer that is a special case of the delta rule, and its options."""
    rng = np.random.default_rng(time)
    r, k, log_w = rng.standard_normal((3, BATCH, time, HEADS, KEY))
    v = rng.standard_normal((BATCH, time, HEADS, VALUE))
    state = rng.standard_normal((BATCH, HEADS, VALUE, KEY))
    removal, rate = rng.standard_normal(k.shape), rng.uniform(size=k.shape)
    removal /= np.linalg.norm(removal, axis=-1, keepdims=True)
    arrays = {"r": r, "log_w": -np.exp(3 * log_w), "k": k, "v": v, "state": state}
    if kind == "rwkv6":
        return arrays | {"u": rng.standard_normal((HEADS, KEY))}, {}
    if kind == "gated linear attention":
        return arrays, {}
    arrays |= {"a": -removal, "b": rate * removal}
    if kind == "any decay":
        return arrays, {}
    return arrays | {"log_w": LEAST_LOG_DECAY / (1 + np.exp(log_w))}, {"min_log_w": LEAST_LOG_DECAY}


KINDS = ("rwkv7", "any decay", "rwkv6", "gated linear attention")


def loop(r, log_w, k, v, state, a=None, b=None, u=None, lengths=None, reset=None):
    """Computes the equation step by step in NumPy, in the dtype of the arrays."""
    y, last = np.zeros_like(v), state.copy()
    for row, t in np.ndindex(v.shape[:2]):
        if lengths is not None and t >= lengths[row]:
            continue
        before = 0 * last[row] if reset is not None and reset[row, t] else last[row]
        learned = v[row, t][:, :, None] * k[row, t][:, None, :]
        after = before * np.exp(log_w[row, t])[:, None, :] + learned
        if a is not None:
            corrected = (before @ a[row, t][:, :, None]) * b[row, t][:, None, :]
            after = after + corrected
        read = after if u is None else before + u[:, None, :] * learned
        y[row, t] = (read @ r[row, t][:, :, None])[:, :, 0]
        last[row] = after
    return y, last


def masks(time: int) -> dict:
    rng = np.random.default_rng(1)
    lengths = np.array([time, max(time - 20, 0), 0])
    return {"lengths": lengths, "reset": rng.uniform(size=(BATCH, time)) < 0.15}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("time", [1, 37, pytest.param(300, marks=pytest.mark.slow)])
def test_is_the_loop(x64, method, kind, time):
    arrays, options = inputs(kind, time)
    active = (np.arange(time) < masks(time)["lengths"][:, None])[..., None, None]
    for mask in ({}, masks(time)):
        expected, expected_last = loop(**arrays, **mask)
        y, last = delta_rule(**arrays, **options, **mask, method=method)
        kept = active if mask else np.ones_like(active)
        assert_same(np.where(kept, y, 0), expected, "y")
        assert_same(last, expected_last, "state")


@pytest.mark.parametrize(
    "kind", ["rwkv7", "rwkv6", *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS[1::2])]
)
def test_all_forms_have_the_same_gradients(x64, kind):
    arrays, options = inputs(kind, 150)
    mask = masks(150)
    active = (np.arange(150) < mask["lengths"][:, None])[..., None, None]

    def loss(arrays, method):
        y, last = delta_rule(**arrays, **options, **mask, method=method)
        return jnp.sum(jnp.sin(jnp.where(active, y, 0))) + jnp.sum(jnp.cos(last))

    sequential, *others = (jax.jit(jax.grad(loss), static_argnums=1)(arrays, m) for m in METHODS)
    for name, gradient in sequential.items():
        for other in others:
            assert_same(other[name], gradient, name)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["rwkv6", "any decay"])
def test_decays_of_every_size_are_exact_and_finite(x64, method, kind):
    """Later steps lose no digits after a step at which the state decays to zero."""
    arrays, _ = inputs(kind, 64)
    sizes = np.array([-np.inf, -1e30, -1e5, -800.0, -20.0, -1.0, -1e-3, -1e-9, 0.0])
    shape = arrays["log_w"].shape
    arrays["log_w"] = np.random.default_rng(2).choice(sizes, shape, p=[0.05] * 4 + [0.16] * 5)
    expected, expected_last = loop(**arrays)
    y, last = delta_rule(**arrays, method=method)
    assert_same(y, expected, "y")
    assert_same(last, expected_last, "state")
    gradients = jax.grad(lambda x: jnp.sum(delta_rule(**x, method=method)[0] ** 2))(arrays)
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())


def test_a_log_decay_below_the_least_counts_as_it():
    arrays, options = inputs("rwkv7", 40)
    arrays = {name: np.float32(array) for name, array in arrays.items()}
    low = arrays | {"log_w": np.where(arrays["log_w"] < -0.3, -9, arrays["log_w"])}
    at = arrays | {"log_w": np.where(arrays["log_w"] < -0.3, LEAST_LOG_DECAY, arrays["log_w"])}
    np.testing.assert_array_equal(delta_rule(**low, **options)[0], delta_rule(**at, **options)[0])


@pytest.mark.parametrize("method", METHODS)
def test_a_log_decay_at_the_least_has_its_whole_gradient(x64, method):
    arrays, _ = inputs("rwkv7", 40)

    def gradient(least):
        def total(log_w):
            return delta_rule(**arrays | {"log_w": log_w}, min_log_w=least, method=method)[0].sum()

        return jax.grad(total)(np.full_like(arrays["log_w"], LEAST_LOG_DECAY))

    assert_same(gradient(LEAST_LOG_DECAY), gradient(None), "the gradient of log_w")


@pytest.mark.parametrize("method", METHODS)
def test_no_keys_are_no_output(method):
    r, v = np.ones((2, 20, 3, 0)), np.ones((2, 20, 3, 5))
    y, state = delta_rule(r, r, r, v, method=method)
    assert (y.shape, state.shape) == (v.shape, (2, 3, 5, 0))
    assert not y.any()


@pytest.mark.parametrize("kind", ["rwkv7", "any decay"])
def test_float32_errs_as_the_loop_does(kind):
    """The decays of rwkv7 are at their lower bound."""
    arrays, options = inputs(kind, 256)
    if kind == "rwkv7":
        arrays["log_w"] = np.full_like(arrays["log_w"], LEAST_LOG_DECAY)
    exact, _ = loop(**arrays)
    single = {name: np.float32(array) for name, array in arrays.items()}
    plain, _ = loop(**single)
    for method in METHODS:
        y, _ = delta_rule(**single, **options, method=method)
        error, bound = rms(np.asarray(y) - exact) / rms(exact), rms(plain - exact) / rms(exact)
        assert error <= max(K * bound, floor(np.dtype("float32")))


def test_one_key_again_and_again():
    """Powers of the scores grow to 6,435 here, although their alternating sum is at most 1."""
    rng = np.random.default_rng(0)
    k = np.zeros((1, 64, 1, 4))
    k[..., 0] = 1
    v = rng.standard_normal(k.shape)
    arrays = k, 0 * k, k, v, np.zeros((1, 1, 4, 4)), -k, k
    exact, _ = loop(*arrays)
    r, log_w, k, v, state, a, b = map(np.float32, arrays)
    y, _ = delta_rule(r, log_w, k, v, a, b, state, method="chunked")
    assert rms(np.asarray(y) - exact) <= floor(np.dtype("float32")) * rms(exact)


@pytest.mark.parametrize("method", METHODS)
def test_a_nan_stays_in_its_document(method):
    arrays, options = inputs("rwkv7", 40)
    arrays = {name: np.float32(array) for name, array in arrays.items()}
    reset = np.zeros((BATCH, 40), bool)
    reset[:, [9, 20]] = True
    expected, expected_last = delta_rule(**arrays, **options, reset=reset, method=method)
    for name in ("r", "log_w", "k", "v", "a", "b"):
        planted = arrays[name].copy()
        planted[1, 12, 0, 2] = np.nan
        y, last = delta_rule(**arrays | {name: planted}, **options, reset=reset, method=method)
        reached = np.zeros(y.shape, bool)
        reached[1, 12:20, 0] = True
        np.testing.assert_array_equal(np.where(reached, 0, y), np.where(reached, 0, expected))
        assert np.isnan(np.asarray(y)[reached]).all()
        np.testing.assert_array_equal(last, expected_last)


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_is_computed_in_float32(method):
    arrays, options = inputs("rwkv7", 40)
    half = {name: jnp.asarray(array, jnp.bfloat16) for name, array in arrays.items()}
    single = {name: array.astype(jnp.float32) for name, array in half.items()}
    y, last = delta_rule(**half, **options, method=method)
    expected = delta_rule(**single, **options, method=method)
    assert y.dtype == last.dtype == jnp.float32
    np.testing.assert_array_equal(y, expected[0])
    np.testing.assert_array_equal(last, expected[1])


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("min_log_w", [LEAST_LOG_DECAY, None])
def test_memory_of_65536_steps(method, min_log_w):
    """Forward and backward together need at most 6 times the memory of the inputs."""
    shape = jax.ShapeDtypeStruct((1, 65536, 4, 64), jnp.float32)

    def loss(*arrays):
        return delta_rule(*arrays, min_log_w=min_log_w, method=method)[0].sum()

    gradients = jax.jit(jax.grad(loss, argnums=range(6)))
    memory = gradients.lower(*[shape] * 6).compile().memory_analysis()
    total = sum(getattr(memory, f"{part}_size_in_bytes") for part in ("argument", "output", "temp"))
    assert total <= 6 * 6 * 4 * shape.size
