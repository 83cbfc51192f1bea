"""Attention without a mask, and the caches of attention."""

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

from jax_models import Attention, LocalAttention, SelfAttentionBlock, Stack, ops
from parity_tests.engine.bounds.tolerance import assert_same

build = partial(Attention, 8, 4, num_kv_heads=2, param_dtype=jnp.float64)


def test_a_view_sets_the_caches_of_a_model():
    rngs = nnx.Rngs(0)
    model = Stack(
        [
            Attention(8, 2, rngs=rngs),
            LocalAttention(8, 2, window=5, rngs=rngs),
            SelfAttentionBlock(8, 2, rngs=rngs),
        ]
    )
    view = nnx.view(model, max_length=9)
    assert [state.keys.shape[1] for state in view.init_state(1)] == [9, 4, 9]
    assert [state.keys.shape[1] for state in model.init_state(1)] == [0, 4, 1024]


@pytest.mark.slow
def test_without_a_limit_whole_sequences_have_any_length(x64):
    layer, x = build(rngs=nnx.Rngs(0)), np.random.default_rng(0).standard_normal((2, 30, 8))
    lengths = np.array([30, 4])
    call = jax.jit(layer.__call__)
    y, state = call(x, lengths=lengths)
    np.testing.assert_array_equal(state.position, lengths)
    expected, _ = jax.jit(nnx.view(layer, max_length=30).__call__)(x, lengths=lengths)
    assert_same(y, expected, "outputs")
    assert_same(call(x[1, :4])[0], y[1, :4], "a row without a batch")
    with pytest.raises(ValueError, match="max_length: expected the length"):
        layer(x, state)


@pytest.mark.slow
def test_the_outputs_behind_max_length_are_nan(x64):
    layer, x = build(max_length=6, rngs=nnx.Rngs(0)), np.ones((1, 12, 8))
    with pytest.raises(ValueError, match="x: expected at most max_length=6 steps, got 12"):
        layer(x)
    call = jax.jit(layer.__call__)
    y, state = call(x[:, :4])
    behind, _ = call(x[:, :4], state)
    y, _ = call(x, reset=jnp.zeros((1, 12), bool).at[0, 5].set(True))
    assert not jnp.isnan(behind[0, :2]).any()
    assert jnp.isnan(behind[0, 2:]).all()
    assert not jnp.isnan(y[0, :11]).any()
    assert jnp.isnan(y[0, 11]).all()


def test_a_step_needs_no_memory_for_the_slots_that_are_not_filled():
    """A step works on one tile of the cache at a time, and writes its key in place."""
    slots = 2**14
    layer = Attention(64, 4, max_length=slots, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)
    step = jax.jit(lambda p, x, s: nnx.merge(graphdef, p).step(x, s), donate_argnums=2)
    state = jax.eval_shape(lambda: layer.init_state(1))
    program = step.lower(params, jax.ShapeDtypeStruct((1, 64), jnp.float32), state).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4 * slots * 64 / 4


@pytest.mark.optimized
@pytest.mark.parametrize("resets", [False, True])
def test_a_step_takes_no_time_for_the_slots_that_are_not_filled(resets):
    """Visiting the empty tiles of the larger cache would take ten times as long."""

    def generation(slots: int):
        layer = Attention(64, 4, max_length=slots, rngs=nnx.Rngs(0))
        graphdef, params = nnx.split(layer)
        reset = jnp.zeros(1, bool) if resets else None

        @partial(jax.jit, donate_argnums=2)
        def steps(params, x, state):
            layer = nnx.merge(graphdef, params)
            return jax.lax.fori_loop(0, 64, lambda _, c: layer.step(*c, reset=reset), (x, state))

        return steps, params, (jnp.ones((1, 64)), layer.init_state(1))

    # Run the caches in turn, so that other programs slow both down.
    generations = {slots: generation(slots) for slots in (2**13, 2**17)}
    times = {slots: [] for slots in generations}
    for _ in range(30):
        for slots, (steps, params, carry) in generations.items():
            start = time.perf_counter()
            carry = jax.block_until_ready(steps(params, *carry))
            times[slots].append(time.perf_counter() - start)
            generations[slots] = steps, params, carry
    assert min(times[2**17]) < 3 * min(times[2**13])


@pytest.mark.parametrize("num_steps", [1, 40])
def test_only_filled_slots_are_read(x64, num_steps):
    """The others may hold anything, and their gradients are zero."""
    rng = np.random.default_rng(num_steps)
    q, k, v = (rng.standard_normal((2, num_steps, heads, 4)) for heads in (4, 2, 2))
    keys, values = rng.standard_normal((2, 2, 1100, 2, 4))
    position = np.array([3, 541])
    filled = (np.arange(1100) < position[:, None])[..., None, None]

    @jax.jit
    def run(keys, values):
        def loss(keys, values):
            state = ops.LocalAttentionState(jnp.asarray(position), keys, values)
            y, _ = ops.local_attention(q, k, v, state)
            return jnp.sum(jnp.sin(y)), y

        return jax.grad(loss, (0, 1), has_aux=True)(keys, values)

    gradients, y = run(keys, values)
    others = run(np.where(filled, keys, np.nan), np.where(filled, values, np.inf))
    assert_same(others[1], y, "outputs")
    for gradient, other in zip(gradients, others[0], strict=True):
        assert_same(other, gradient, "gradients")
        assert (np.asarray(gradient)[~np.broadcast_to(filled, keys.shape)] == 0).all()
        assert (np.asarray(gradient) != 0).sum() == position.sum() * 8


@pytest.mark.slow
def test_a_step_of_several_states_at_once(x64):
    """The states have different positions, so different tiles of their caches are filled."""
    layer, rng = build(max_length=1100, rngs=nnx.Rngs(0)), np.random.default_rng(0)
    keys, values = rng.standard_normal((2, 3, 2, 1100, 2, 2))
    positions = jnp.array([[0, 3], [600, 541], [1099, 20]], jnp.int32)
    states = ops.LocalAttentionState(positions, jnp.asarray(keys), jnp.asarray(values))
    x = jnp.asarray(rng.standard_normal((3, 2, 8)))
    gradient = jax.grad(lambda x, state: jnp.sum(jnp.sin(layer.step(x, state)[0])))
    for function in (lambda x, state: layer.step(x, state)[0], gradient):
        found, one = jax.jit(jax.vmap(function))(x, states), jax.jit(function)
        for i in range(3):
            expected = one(x[i], jax.tree.map(lambda a: a[i], states))  # noqa: B023
            assert_same(found[i], expected, f"state {i}")


@pytest.mark.slow
@pytest.mark.parametrize("layer", [build, partial(build, window=150)])
def test_an_export_for_any_number_of_steps_attends_over_several_tiles(x64, layer):
    graphdef, params = nnx.split(layer(rngs=nnx.Rngs(0)))
    x = np.random.default_rng(0).standard_normal((2, 200, 8))

    def outputs_and_gradients(params, x):
        def loss(params, x):
            y, _ = nnx.merge(graphdef, params)(x)
            return jnp.sum(jnp.sin(y)), y

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    shape = jax.ShapeDtypeStruct((2, *export.symbolic_shape("t"), 8), x.dtype)
    compiled = jax.jit(outputs_and_gradients)
    found, expected = export.export(compiled)(params, shape).call(params, x), compiled(params, x)
    jax.tree.map(lambda a, b: assert_same(a, b, "any number of steps"), found, expected)


@pytest.mark.slow
def test_the_gradient_of_a_cache_narrower_than_the_queries(x64):
    """It is that of a cache in the queries' dtype."""
    layer = build(max_length=9, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).standard_normal((2, 9, 8))
    _, state = layer(x[:, :5])

    def gradients(dtype):
        def loss(x, cache):
            return jnp.sum(jnp.sin(layer(x, state._replace(keys=cache[0], values=cache[1]))[0]))

        cache = tuple(array.astype(dtype) for array in rounded)
        return jax.jit(jax.grad(loss, argnums=(0, 1)))(x[:, 5:], cache)

    rounded = [array.astype(jnp.float16) for array in state[1:]]
    (of_x, of_cache), (expected, expected_of_cache) = gradients(jnp.float16), gradients(x.dtype)
    assert_same(of_x, expected, "x")
    for found, whole in zip(of_cache, expected_of_cache, strict=True):
        assert found.dtype == jnp.float16
        np.testing.assert_allclose(found, whole, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("window", [None, 5])
def test_attention_without_a_mask_is_causal(x64, window):
    q, k, v = (np.random.default_rng(0).standard_normal((2, 300, n, 4)) for n in (4, 2, 2))
    distance = np.arange(300)[:, None] - np.arange(300)
    mask = np.broadcast_to((distance >= 0) & (distance < (window or 300)), (2, 300, 300))
    expected = jax.jit(ops.attention)(q, k, v, mask)
    for options, what in (({}, "in tiles"), ({"dropout": lambda weights: weights}, "as a whole")):
        y = jax.jit(partial(ops.attention, window=window, **options))(q, k, v)
        assert_same(y, expected, what)
    with pytest.raises(ValueError, match="k: expected the 299 steps of q"):
        ops.attention(q[:, 1:], k, v)
    with pytest.raises(ValueError, match="window: expected None with a mask"):
        ops.attention(q, k, v, mask, window=3)


@pytest.mark.slow
def test_dropout_of_weights_continues_from_a_state(x64):
    """Dropout sees the same weights whether the keys are in the state or in the sequence."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 9, 2, 4))
    empty = ops.LocalAttentionState(jnp.zeros(2, jnp.int32), *jnp.zeros((2, 2, 9, 2, 4)))
    options = {"dropout": lambda weights: weights * 2, "holds_whole_document": True}
    attend = partial(ops.local_attention, **options)
    whole, _ = jax.jit(partial(attend, empty=True))(q, k, v, empty)
    call = jax.jit(attend)
    _, state = call(q[:, :5], k[:, :5], v[:, :5], empty)
    rest, _ = call(q[:, 5:], k[:, 5:], v[:, 5:], state)
    assert_same(rest, whole[:, 5:], "outputs")
    step, _ = call(q[:, 5:6], k[:, 5:6], v[:, 5:6], state)
    assert_same(step, whole[:, 5:6], "a single step")
    assert_same(whole, 2 * jax.jit(ops.attention)(q, k, v), "twice as large")
