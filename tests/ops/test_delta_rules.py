"""The delta rules on their own: all their forms, masks, extreme values, derivatives and memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_models.ops import delta_rule, gated_delta_rule
from jax_models.ops.delta import definition
from parity_tests.engine.bounds.tolerance import K, assert_same, floor, rms

METHODS = ("sequential", "chunked", "definition")
KINDS = ("rwkv7", "any decay", "rwkv6", "gated linear attention", "gated", "mamba2", "kimi")
BATCH, KEY_HEADS, HEADS, KEY, VALUE = 3, 2, 4, 5, 6
LEAST_LOG_DECAY = -0.6
methods = pytest.mark.parametrize("method", METHODS)
methods_and_auto = pytest.mark.parametrize("method", [*METHODS, "auto"])
gated = partial(gated_delta_rule, normalize=True, scale=0.5)
mamba2 = partial(gated, beta=None)
rwkv7 = partial(delta_rule, min_log_w=LEAST_LOG_DECAY)


def problem(kind: str, time: int):
    """A rule with its options, and its named arrays. Some decays are strong and some weak."""
    rng = np.random.default_rng(time)
    v = rng.standard_normal((BATCH, time, HEADS, VALUE))
    state = rng.standard_normal((BATCH, HEADS, VALUE, KEY))
    if kind in ("gated", "mamba2", "kimi"):
        q, k = rng.standard_normal((2, BATCH, time, KEY_HEADS, KEY))
        features = (KEY,) if kind == "kimi" else ()
        log_decay = -np.exp(2 * rng.standard_normal((BATCH, time, HEADS, *features)) - 1)
        arrays = {"q": q, "k": k, "v": v, "log_decay": log_decay, "state": state}
        if kind == "mamba2":
            return mamba2, arrays
        return gated, arrays | {"beta": rng.uniform(0, 2, v.shape[:3])}
    r, k, log_w = rng.standard_normal((3, BATCH, time, HEADS, KEY))
    removal, rate = rng.standard_normal(k.shape), rng.uniform(size=k.shape)
    removal /= np.linalg.norm(removal, axis=-1, keepdims=True)
    arrays = {"r": r, "log_w": -np.exp(3 * log_w), "k": k, "v": v, "state": state}
    if kind == "rwkv6":
        return delta_rule, arrays | {"u": rng.standard_normal((HEADS, KEY))}
    if kind == "gated linear attention":
        return delta_rule, arrays
    arrays |= {"a": -removal, "b": rate * removal}
    if kind == "any decay":
        return delta_rule, arrays
    return rwkv7, arrays | {"log_w": LEAST_LOG_DECAY / (1 + np.exp(log_w))}


def masks(time: int) -> dict:
    rng = np.random.default_rng(1)
    lengths = np.array([time, max(time - 20, 0), 0])
    return {"lengths": lengths, "reset": rng.uniform(size=(BATCH, time)) < 0.15}


def active(time: int):
    return (np.arange(time) < masks(time)["lengths"][:, None])[..., None, None]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("time", "is_masked"), [(1, False), (150, True)])
def test_every_form_is_the_definition(x64, kind, time, is_masked, monkeypatch):
    """Compares gradients, too, for which the definition computes each segment of steps twice."""
    monkeypatch.setattr(definition, "FEW_STATES", 0)
    rule, arrays = problem(kind, time)
    mask = masks(time) if is_masked else {}

    @partial(jax.jit, static_argnums=0)
    def with_gradients(method, arrays):
        def run(arrays):
            y, last = rule(**arrays, **mask, method=method)
            return jnp.where(active(time), y, 0) if is_masked else y, last

        results, pull_back = jax.vjp(run, arrays)
        return results, pull_back(jax.tree.map(jnp.cos, results))

    expected = with_gradients("definition", arrays)
    for method in ("sequential", "chunked", "auto"):
        same = partial(assert_same, what=f"{method} and the definition")
        jax.tree.map(same, with_gradients(method, arrays), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rwkv6", "any decay", "gated", "mamba2", "kimi"])
def test_decays_of_every_size_are_exact_and_finite(x64, kind):
    """Later steps lose no digits after a step at which the state decays to zero."""
    rule, arrays = problem(kind, 140)
    sizes = np.array([-np.inf, -1e30, -1e5, -800.0, -20.0, -1.0, -1e-3, -1e-9, 0.0])
    name = "log_decay" if "log_decay" in arrays else "log_w"
    chances = [0.02] * 4 + [0.184] * 5
    arrays[name] = np.random.default_rng(2).choice(sizes, arrays[name].shape, p=chances)
    expected = rule(**arrays, method="definition")
    for method in ("sequential", "chunked"):
        same = partial(assert_same, what=f"{method} and the definition")
        jax.tree.map(same, rule(**arrays, method=method), expected)
    for method in METHODS:
        gradients = jax.grad(lambda x, method=method: jnp.sum(rule(**x, method=method)[0] ** 2))
        assert all(np.isfinite(gradient).all() for gradient in gradients(arrays).values())


def test_a_log_decay_below_the_least_counts_as_it():
    _, arrays = problem("rwkv7", 40)
    arrays = {name: np.float32(array) for name, array in arrays.items()}
    low = arrays | {"log_w": np.where(arrays["log_w"] < -0.3, -9, arrays["log_w"])}
    at = arrays | {"log_w": np.where(arrays["log_w"] < -0.3, LEAST_LOG_DECAY, arrays["log_w"])}
    np.testing.assert_array_equal(rwkv7(**low)[0], rwkv7(**at)[0])


@pytest.mark.slow
@methods
def test_a_log_decay_at_the_least_has_its_whole_gradient(x64, method):
    _, arrays = problem("rwkv7", 40)

    def gradient(least):
        def total(log_w):
            return delta_rule(**arrays | {"log_w": log_w}, min_log_w=least, method=method)[0].sum()

        return jax.grad(total)(np.full_like(arrays["log_w"], LEAST_LOG_DECAY))

    assert_same(gradient(LEAST_LOG_DECAY), gradient(None), "the gradient of log_w")


@methods
def test_no_keys_are_no_output(method):
    r, v = np.ones((2, 20, 3, 0)), np.ones((2, 20, 3, 5))
    y, state = delta_rule(r, r, r, v, method=method)
    assert (y.shape, state.shape) == (v.shape, (2, 3, 5, 0))
    assert not y.any()


@pytest.mark.parametrize("kind", ["rwkv7", "any decay", "gated", "mamba2", "kimi"])
def test_float32_errs_as_the_definition_does(kind):
    """The decays of rwkv7 are at their lower bound."""
    rule, arrays = problem(kind, 256)
    if kind == "rwkv7":
        arrays["log_w"] = np.full_like(arrays["log_w"], LEAST_LOG_DECAY)
    with jax.enable_x64(True):
        exact = np.asarray(rule(**arrays, method="definition")[0])
    single = {name: np.float32(array) for name, array in arrays.items()}
    outputs = (np.asarray(rule(**single, method=method)[0]) for method in METHODS)
    *errors, plain = (rms(y - exact) / rms(exact) for y in outputs)
    assert max(errors) <= max(K * plain, floor(np.dtype("float32")))


@pytest.mark.parametrize(
    "rule",
    [
        lambda k, v, **options: delta_rule(k, 0 * k, k, v, -k, k, **options),
        lambda k, v, **options: gated_delta_rule(k, k, v, 0 * k[..., 0], k[..., 0], **options),
    ],
    ids=["delta", "gated"],
)
def test_one_key_again_and_again(rule):
    """Powers of the scores grow large here, although their alternating sum is at most 1."""
    k = np.zeros((1, 128, 1, 4), np.float32)
    k[..., 0] = 1
    v = np.float32(np.random.default_rng(0).standard_normal(k.shape))
    y, _ = rule(k, v, method="chunked")
    assert rms(np.asarray(y) - v) <= floor(np.dtype("float32")) * rms(v)


@methods
@pytest.mark.parametrize("kind", ["rwkv7", "gated", "kimi"])
def test_a_nan_stays_in_its_document(kind, method):
    """The outputs and gradients of the other documents are the same to the last bit."""
    rule, arrays = problem(kind, 100)
    arrays = {name: np.float32(array) for name, array in arrays.items()}
    reset = np.zeros((BATCH, 100), bool)
    reset[:, [9, 70]] = True
    others = np.ones((BATCH, 100, 1, 1), bool)
    others[1, 9:70] = False

    @jax.jit
    def results(arrays):
        def loss(arrays):
            y, last = rule(**arrays, reset=reset, method=method)
            return jnp.sum(jnp.where(others, y, 0) ** 2), (y, last)

        gradients, (y, last) = jax.grad(loss, has_aux=True)(arrays)
        return y, last, gradients["v"]

    expected, expected_last, expected_gradient = results(arrays)
    for name in arrays.keys() - {"state"}:
        planted = arrays[name].copy()
        planted[1, 12, 0] = np.nan
        y, last, gradient = results(arrays | {name: planted})
        reached = np.zeros(y.shape, bool)
        reached[1, 12:70, : HEADS // planted.shape[2]] = True
        np.testing.assert_array_equal(np.where(reached, 0, y), np.where(reached, 0, expected))
        assert np.isnan(np.asarray(y)[reached]).all()
        np.testing.assert_array_equal(last, expected_last)
        np.testing.assert_array_equal(gradient, expected_gradient)


@pytest.mark.slow
@methods
@pytest.mark.parametrize(
    ("kind", "dtype"), [("rwkv7", "bfloat16"), ("gated", "bfloat16"), ("gated", "float16")]
)
def test_16_bits_are_computed_in_float32(kind, dtype, method):
    rule, arrays = problem(kind, 70)
    half = {name: jnp.asarray(array, dtype) for name, array in arrays.items()}
    if kind == "gated":
        half["log_decay"] = half["log_decay"].at[0, 3].set(-jnp.inf)
    single = {name: array.astype(jnp.float32) for name, array in half.items()}
    found, expected = (rule(**arrays, method=method) for arrays in (half, single))
    for ours, wide in zip(found, expected, strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_array_equal(ours, wide)


@pytest.mark.slow
def test_vmap_over_an_axis_that_some_arrays_lack(x64):
    _, arrays = problem("gated", 70)
    several = arrays | {name: np.stack([arrays[name], -arrays[name]], 1) for name in ("q", "v")}
    axes = {name: 1 if name in ("q", "v") else None for name in arrays}

    def gradients(arrays):
        return jax.grad(lambda x: jnp.sum(jnp.sin(gated(**x, method="chunked")[0])))(arrays)

    found = jax.vmap(gradients, in_axes=(axes,))(several)
    for i, sign in enumerate((1, -1)):
        expected = gradients(arrays | {name: sign * arrays[name] for name in ("q", "v")})
        for name in arrays:
            assert_same(found[name][i], expected[name], name)


def check_nan_over_devices() -> None:
    """A NaN on the first device does not pass a restart on the second, in either rule."""
    mesh = jax.make_mesh((2,), ("time",), axis_types=(AxisType.Auto,))
    of_time = P(None, "time")
    k = jnp.ones((1, 8, 1, 2)).at[0, 1].set(jnp.nan)
    reset = jnp.zeros((1, 8), bool).at[0, 5].set(True)

    def with_gate(k, reset):
        one = jnp.ones(k.shape[:3])
        return gated_delta_rule(k, k, k, -one, one, reset=reset, time_axis="time")

    def without(k, reset):
        return delta_rule(k, -jnp.ones_like(k), k, k, reset=reset, time_axis="time")

    for run in (with_gate, without):
        divided = jax.shard_map(
            run, mesh=mesh, in_specs=(of_time,) * 2, out_specs=(of_time, P()), check_vma=False
        )
        y, last = jax.jit(divided)(k, reset)
        assert np.isnan(y[0, 1:5]).all()
        assert np.isfinite(y[0, 5:]).all()
        assert np.isfinite(last).all()


@pytest.mark.slow
def test_a_nan_stays_in_its_document_over_devices(on_eight_devices):
    on_eight_devices(check_nan_over_devices)


def memory_of_gradients(rule, *shapes: tuple[int, ...]) -> int:
    """The memory of the forward and backward pass together, in bytes."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    gradients = jax.jit(jax.grad(lambda *xs: rule(*xs)[0].sum(), argnums=range(len(arrays))))
    memory = gradients.lower(*arrays).compile().memory_analysis()
    return sum(getattr(memory, f"{part}_size_in_bytes") for part in ("argument", "output", "temp"))


@pytest.mark.slow
@methods_and_auto
@pytest.mark.parametrize("min_log_w", [LEAST_LOG_DECAY, None])
def test_memory_of_65536_steps(method, min_log_w):
    """It is at most 6 times the memory of the inputs."""
    rule = partial(delta_rule, min_log_w=min_log_w, method=method)
    assert memory_of_gradients(rule, *[(1, 65536, 4, 64)] * 6) <= 6 * 6 * 4 * 65536 * 4 * 64


def test_memory_is_half_a_mebibyte_a_token():
    """At 32 heads of 128."""
    time = 8192
    wide, narrow = (1, time, 32, 128), (1, time, 32)
    assert memory_of_gradients(gated, wide, wide, wide, narrow, narrow) <= time * 2**19


@pytest.mark.parametrize("has_beta", [False, True])
def test_a_large_state_of_an_unknown_batch_is_exported(has_beta):
    """The form that runs is chosen by the size of the state."""
    (batch,) = export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((batch, 16, 8, 128), jnp.float32)
    rate = jax.ShapeDtypeStruct(x.shape[:3], x.dtype)

    def run(x, log_decay, beta):
        return gated_delta_rule(x, x, x, log_decay, beta)[0]

    exported = export.export(jax.jit(run))(x, rate, rate if has_beta else None)
    assert exported.out_avals[0].shape == x.shape
