"""The local attention of Griffin: windows, tiles, devices, memory and extreme values."""

from functools import partial
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_models import LocalAttention, ops
from parity_tests.engine.bounds.tolerance import assert_same


@pytest.mark.slow
@pytest.mark.parametrize(("window", "before"), [(4, 11), (1, 0), (40, 11)])
def test_local_attention_in_tiles_is_attention_over_the_whole_row(x64, monkeypatch, window, before):
    """Compares outputs and gradients for packed documents, in pieces that pass on their state."""
    monkeypatch.setattr(import_module("jax_models.ops.attention.tiles"), "TILE", 16)
    monkeypatch.setattr(import_module("jax_models.ops.attention.tiles"), "SMALL_TILE", 8)
    rng = np.random.default_rng(window)
    time = 30
    q, k, v = (rng.standard_normal((2, time, heads, 6)) for heads in (4, 2, 2))
    reset = np.zeros((2, time), bool)
    reset[0, [13, 17]] = reset[1, 28] = True

    def in_pieces(q, k, v):
        shape = (2, window - 1, 2, 6)
        state = ops.LocalAttentionState(jnp.zeros(2, jnp.int32), jnp.zeros(shape), jnp.zeros(shape))
        outputs = []
        for start, end in ((0, before), (before, time - 1), (time - 1, time)):
            piece = (array[:, start:end] for array in (q, k, v))
            y, state = ops.local_attention(*piece, state, reset=reset[:, start:end])
            outputs.append(y)
        return jnp.concatenate(outputs, axis=1)

    step, documents = np.arange(time), np.cumsum(reset, axis=1)
    distance = step[:, None] - step
    mask = (distance >= 0) & (distance < window) & (documents[:, :, None] == documents[:, None])
    expected = partial(ops.attention, mask=mask)

    def outputs_and_gradients(f):
        def loss(*args):
            y = f(*args)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)

    found, of_whole = outputs_and_gradients(in_pieces), outputs_and_gradients(expected)
    for ours, whole in zip(found, of_whole, strict=True):  # with a single key, q has no gradient
        assert_same(ravel_pytree(ours)[0], ravel_pytree(whole)[0], "gradients, then outputs")


@pytest.mark.parametrize(("platform", "tile"), [("cpu", 120), ("tpu", 352)])
def test_the_tile_is_that_of_the_platform_that_a_program_is_lowered_for(platform, tile):
    """The machine that lowers the program does not matter."""
    x = jax.ShapeDtypeStruct((2, 700, 1, 16), jnp.float32)
    state = ops.LocalAttentionState(jnp.zeros(2, jnp.int32), *jnp.zeros((2, 2, 255, 1, 16)))
    program = jax.jit(ops.local_attention).trace(x, x, x, state)
    text = program.lower(lowering_platforms=(platform,)).as_text()
    assert f"x{tile}x16xf32" in text
    assert f"x{ {120: 352, 352: 120}[tile] }x16xf32" not in text


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "small_tiles", "definition"])
@pytest.mark.parametrize(("faulty", "number"), [("q", np.nan), ("k", np.inf), ("v", -np.inf)])
def test_only_the_steps_that_see_a_number_that_is_not_finite_know_it(
    monkeypatch, faulty, number, method
):
    """In these steps, the head's outputs are NaN and pass on no gradient."""
    monkeypatch.setattr(import_module("jax_models.ops.attention.tiles"), "TILE", 16)
    monkeypatch.setattr(import_module("jax_models.ops.attention.tiles"), "SMALL_TILE", 8)
    time, window, step = 30, 6, 11
    rng = np.random.default_rng(0)
    sound = {name: rng.standard_normal((1, time, 2, 4)).astype(np.float32) for name in "qkv"}
    broken = {name: array.copy() for name, array in sound.items()}
    broken[faulty][0, step, 1, 2] = number
    cache = jnp.zeros((1, window - 1, 2, 4))
    state = ops.LocalAttentionState(jnp.zeros(1, jnp.int32), cache, cache)
    touched = np.zeros((time, 2), bool)
    touched[step : step + (1 if faulty == "q" else window), 1] = True

    @jax.jit
    def run(arrays):
        def attend(arrays):
            y = ops.local_attention(**arrays, state=state, method=method)[0]
            return jnp.sum(jnp.where(touched[None, ..., None], 0, y)), y

        return jax.grad(attend, has_aux=True)(arrays)

    (gradients, y), (of_sound, whole) = run(broken), run(sound)
    assert np.isnan(y[0][touched]).all()
    np.testing.assert_allclose(y[0][~touched], whole[0][~touched], rtol=1e-5, atol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), gradients, of_sound)


def test_tiles_vary_over_the_devices_of_a_mesh():
    """The initial state of zeros does not vary."""
    layer = LocalAttention(8, 2, window=3, rngs=nnx.Rngs(0))
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    run = jax.shard_map(lambda x: layer(x)[0], mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    x = jax.ShapeDtypeStruct((2, 300, 8), jnp.float32)
    assert jax.eval_shape(run, x).shape == x.shape


@pytest.mark.slow
def test_the_memory_of_training_grows_with_time_alone():
    """It grows neither with the square of the time nor with the window times the time."""
    window, heads, size = 512, 4, 8

    def temporary_bytes(time: int) -> int:
        layer = LocalAttention(heads * size, heads, window=window, rngs=nnx.Rngs(0))
        graphdef, params = nnx.split(layer)

        def loss(params, x):
            return jnp.sum(nnx.merge(graphdef, params)(x)[0] ** 2)

        x = jax.ShapeDtypeStruct((1, time, heads * size), jnp.float32)
        compiled = jax.jit(jax.grad(loss)).lower(params, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporary_bytes(2048), temporary_bytes(8192)
    assert long < 4.1 * short
    assert long < 4 * 8192 * window * heads / 2  # half of the scores of the window


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "local_attention"])
def test_scores_that_overflow_show_no_later_step(name):
    """A query whose visible scores are all −∞ has no softmax."""
    q = jnp.full((1, 3, 1, 1), 1e30)
    v = jnp.arange(3.0).reshape(q.shape)
    if name == "attention":
        y = ops.attention(q, -q, v, jnp.tril(jnp.ones((1, 3, 3), bool)))
    else:
        state = ops.LocalAttentionState(jnp.zeros(1, jnp.int32), *jnp.zeros((2, 1, 2, 1, 1)))
        y, _ = ops.local_attention(q, -q, v, state)
    assert jnp.all(jnp.isnan(y))
