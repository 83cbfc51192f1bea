"""The gated delta rule on its own: all its forms, masks, extreme values, derivatives and memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_models.ops import delta_rule, gated_delta_rule
from parity_tests.engine.bounds.tolerance import K, assert_same, floor, rms

METHODS = ("sequential", "chunked", "auto")
BATCH, KEY_HEADS, HEADS, KEY, VALUE = 3, 2, 4, 5, 6
SEQUENCES = ("q", "k", "v", "log_decay", "beta")


def inputs(time: int) -> dict[str, np.ndarray]:
    """Named arrays. Some decays are strong and some weak."""
    rng = np.random.default_rng(time)
    q, k = rng.standard_normal((2, BATCH, time, KEY_HEADS, KEY))
    v = rng.standard_normal((BATCH, time, HEADS, VALUE))
    log_decay = -np.exp(2 * rng.standard_normal((BATCH, time, HEADS)) - 1)
    beta = rng.uniform(0, 2, (BATCH, time, HEADS))
    state = rng.standard_normal((BATCH, HEADS, VALUE, KEY))
    return dict(zip((*SEQUENCES, "state"), (q, k, v, log_decay, beta, state), strict=True))


def loop(q, k, v, log_decay, beta, state, lengths=None, reset=None):
    """Computes the equation with normalized keys step by step in NumPy."""
    epsilon, shared = q.dtype.type(1e-6), v.shape[2] // k.shape[2]
    q, k = (x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + epsilon) for x in (q, k))
    q, k = (np.repeat(x, shared, axis=2) for x in (q.dtype.type(0.5) * q, k))
    y, last = np.zeros_like(v), state.copy()
    for row, t in np.ndindex(v.shape[:2]):
        if lengths is not None and t >= lengths[row]:
            continue
        S = 0 * last[row] if reset is not None and reset[row, t] else last[row]
        S = S * np.exp(log_decay[row, t])[:, None, None]
        error = v[row, t] - (S @ k[row, t][:, :, None])[..., 0]
        S = S + (beta[row, t][:, None] * error)[:, :, None] * k[row, t][:, None, :]
        y[row, t] = (S @ q[row, t][:, :, None])[..., 0]
        last[row] = S
    return y, last


rule = partial(gated_delta_rule, normalize=True, scale=0.5)


def masks(time: int) -> dict:
    rng = np.random.default_rng(1)
    lengths = np.array([time, max(time - 20, 0), 0])
    return {"lengths": lengths, "reset": rng.uniform(size=(BATCH, time)) < 0.1}


def active(time: int):
    return (np.arange(time) < masks(time)["lengths"][:, None])[..., None, None]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("time", [1, 29, 150])
def test_is_the_loop(x64, method, time):
    arrays = inputs(time)
    for mask in ({}, masks(time)):
        expected, expected_last = loop(**arrays, **mask)
        y, last = rule(**arrays, **mask, method=method)
        assert_same(np.where(active(time), y, 0) if mask else y, expected, "y")
        assert_same(last, expected_last, "state")


def test_all_forms_have_the_same_gradients(x64):
    arrays, mask = inputs(150), masks(150)

    def loss(arrays, method):
        y, last = rule(**arrays, **mask, method=method)
        return jnp.sum(jnp.sin(jnp.where(active(150), y, 0))) + jnp.sum(jnp.cos(last))

    sequential, *others = (jax.jit(jax.grad(loss), static_argnums=1)(arrays, m) for m in METHODS)
    for name, gradient in sequential.items():
        for other in others:
            assert_same(other[name], gradient, name)


@pytest.mark.parametrize("method", METHODS)
def test_decays_of_every_size_are_exact_and_finite(x64, method):
    """Later steps lose no digits after a step at which the state decays to zero."""
    arrays = inputs(140)
    sizes = np.array([-np.inf, -1e30, -1e5, -800.0, -20.0, -1.0, -1e-3, -1e-9, 0.0])
    shape = arrays["log_decay"].shape
    arrays["log_decay"] = np.random.default_rng(2).choice(sizes, shape, p=[0.02] * 4 + [0.184] * 5)
    expected, expected_last = loop(**arrays)
    y, last = rule(**arrays, method=method)
    assert_same(y, expected, "y")
    assert_same(last, expected_last, "state")
    gradients = jax.grad(lambda x: jnp.sum(rule(**x, method=method)[0] ** 2))(arrays)
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())


def test_float32_errs_as_the_loop_does():
    arrays = inputs(256)
    exact, _ = loop(**arrays)
    single = {name: np.float32(array) for name, array in arrays.items()}
    plain, _ = loop(**single)
    for method in METHODS:
        y, _ = rule(**single, method=method)
        error, bound = rms(np.asarray(y) - exact) / rms(exact), rms(plain - exact) / rms(exact)
        assert error <= max(K * bound, floor(np.dtype("float32")))


def test_one_key_again_and_again():
    """Powers of the scores grow to 1e18 here, although their alternating sum is at most 1."""
    rng = np.random.default_rng(0)
    k = np.zeros((1, 128, 1, 4))
    k[..., 0] = 1
    v = rng.standard_normal(k.shape)
    arrays = k, k, v, np.zeros(k.shape[:3]), np.ones(k.shape[:3])
    y, _ = gated_delta_rule(*map(np.float32, arrays), method="chunked")
    assert rms(np.asarray(y) - v) <= floor(np.dtype("float32")) * rms(v)


@pytest.mark.parametrize("method", METHODS)
def test_a_nan_stays_in_its_document(method):
    """The outputs and gradients of the other documents are the same to the last bit."""
    arrays = {name: np.float32(array) for name, array in inputs(140).items()}
    reset = np.zeros((BATCH, 140), bool)
    reset[:, [9, 70]] = True
    others = np.ones((BATCH, 140, 1, 1), bool)
    others[1, 9:70] = False

    @partial(jax.jit, static_argnames="method")
    def results(arrays, method):
        def loss(arrays):
            y, last = rule(**arrays, reset=reset, method=method)
            return jnp.sum(jnp.where(others, y, 0) ** 2), (y, last)

        gradients, (y, last) = jax.grad(loss, has_aux=True)(arrays)
        return y, last, gradients["v"]

    expected, expected_last, expected_gradient = results(arrays, method)
    for name in SEQUENCES:
        planted = arrays[name].copy()
        planted[1, 12, 0] = np.nan
        y, last, gradient = results(arrays | {name: planted}, method)
        reached = np.zeros(y.shape, bool)
        reached[1, 12:70, : HEADS // KEY_HEADS if name in "qk" else 1] = True
        np.testing.assert_array_equal(np.where(reached, 0, y), np.where(reached, 0, expected))
        assert np.isnan(np.asarray(y)[reached]).all()
        np.testing.assert_array_equal(last, expected_last)
        np.testing.assert_array_equal(gradient, expected_gradient)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("method", METHODS)
def test_16_bits_are_computed_in_float32(method, dtype):
    half = {name: jnp.asarray(array, dtype) for name, array in inputs(70).items()}
    half["log_decay"] = half["log_decay"].at[0, 3].set(-jnp.inf)
    single = {name: array.astype(jnp.float32) for name, array in half.items()}
    y, last = rule(**half, method=method)
    expected = rule(**single, method=method)
    assert y.dtype == last.dtype == jnp.float32
    np.testing.assert_array_equal(y, expected[0])
    np.testing.assert_array_equal(last, expected[1])


def test_vmap_over_an_axis_that_some_arrays_lack(x64):
    arrays = inputs(70)
    several = arrays | {name: np.stack([arrays[name], -arrays[name]], 1) for name in ("q", "v")}
    axes = {name: 1 if name in ("q", "v") else None for name in arrays}

    def gradients(arrays):
        return jax.grad(lambda x: jnp.sum(jnp.sin(rule(**x, method="chunked")[0])))(arrays)

    found = jax.vmap(gradients, in_axes=(axes,))(several)
    for i, sign in enumerate((1, -1)):
        expected = gradients(arrays | {name: sign * arrays[name] for name in ("q", "v")})
        for name in arrays:
            assert_same(found[name][i], expected[name], name)


def check_divided_time() -> None:
    """Compares outputs, states and gradients, from a given state and with documents."""
    arrays, reset = inputs(280), np.random.default_rng(2).uniform(size=(BATCH, 280)) < 0.02
    mesh = jax.make_mesh((4,), ("time",), axis_types=(AxisType.Auto,))
    of_time = P(None, "time")
    divided = jax.shard_map(
        lambda arrays, reset: rule(**arrays, reset=reset, time_axis="time", method="chunked"),
        mesh=mesh,
        in_specs=(dict.fromkeys(SEQUENCES, of_time) | {"state": P()}, of_time),
        out_specs=(of_time, P()),
        check_vma=False,  # the last state is the same on all devices
    )

    def results(run):
        def loss(arrays):
            y, last = run(arrays)
            return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(last)), (y, last)

        return jax.tree.leaves(jax.jit(jax.grad(loss, has_aux=True))(arrays))

    found = results(lambda arrays: divided(arrays, reset))
    expected = results(lambda arrays: rule(**arrays, reset=reset, method="sequential"))
    for i, (ours, whole) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(ours, whole, rtol=1e-9, atol=1e-11, err_msg=str(i))


def test_time_divided_over_devices(on_eight_devices):
    on_eight_devices(check_divided_time)


def check_nan_over_devices() -> None:
    """A NaN on the first device does not pass a restart on the second, in either rule."""
    mesh = jax.make_mesh((2,), ("time",), axis_types=(AxisType.Auto,))
    of_time = P(None, "time")
    k = jnp.ones((1, 8, 1, 2)).at[0, 1].set(jnp.nan)
    reset = jnp.zeros((1, 8), bool).at[0, 5].set(True)

    def gated(k, reset):
        one = jnp.ones(k.shape[:3])
        return gated_delta_rule(k, k, k, -one, one, reset=reset, time_axis="time")

    def ungated(k, reset):
        return delta_rule(k, -jnp.ones_like(k), k, k, reset=reset, time_axis="time")

    for run in (gated, ungated):
        divided = jax.shard_map(
            run, mesh=mesh, in_specs=(of_time,) * 2, out_specs=(of_time, P()), check_vma=False
        )
        y, last = jax.jit(divided)(k, reset)
        assert np.isnan(y[0, 1:5]).all()
        assert np.isfinite(y[0, 5:]).all()
        assert np.isfinite(last).all()


def test_a_nan_stays_in_its_document_over_devices(on_eight_devices):
    on_eight_devices(check_nan_over_devices)


@pytest.mark.parametrize("time", [8192, 16384])
def test_memory_is_half_a_mebibyte_a_token(time):
    """Forward and backward together, at 32 heads of 128."""
    wide = jax.ShapeDtypeStruct((1, time, 32, 128), jnp.float32)
    narrow = jax.ShapeDtypeStruct((1, time, 32), jnp.float32)
    gradients = jax.jit(jax.grad(lambda *xs: rule(*xs)[0].sum(), argnums=range(5)))
    memory = gradients.lower(wide, wide, wide, narrow, narrow).compile().memory_analysis()
    total = sum(getattr(memory, f"{part}_size_in_bytes") for part in ("argument", "output", "temp"))
    assert total <= time * 2**19
