"""Griffin beyond parity: windows and chunks, padding, checkpoints and configs."""

import json
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

from jax_models import (
    GriffinLanguageModelConfig,
    LocalAttention,
    griffin_from_weights,
    ops,
    to_torch,
)
from parity_tests.engine.bounds.tolerance import assert_same, floor

CONFIG = GriffinLanguageModelConfig(
    vocab_size=13,
    features=8,
    num_layers=5,
    mlp_features=7,
    recurrent_features=6,
    num_heads=2,
    window=2048,
    block_types=("recurrent", "attention"),
)
OTHER = GriffinLanguageModelConfig(
    vocab_size=13,
    features=16,
    num_layers=3,
    mlp_features=7,
    recurrent_features=12,
    num_heads=4,
    num_kv_heads=2,
    window=2048,
    kernel_size=3,
    block_types=("attention", "recurrent", "recurrent"),
    attention_bias=True,
)


def random_model(config: GriffinLanguageModelConfig, dtype=jnp.float64):
    """Every weight and bias is random; the large ones keep a text from repeating one token."""
    model = config.build(param_dtype=dtype, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    draw = jax.tree.map(
        lambda x: (0.4 * rng.standard_normal(x.shape)).astype(x.dtype), nnx.state(model)
    )
    nnx.update(model, draw)
    return model


def dense_attention(q, k, v, window, documents):
    """`ops.attention` over whole rows, by one mask."""
    step = np.arange(q.shape[1])
    distance = step[:, None] - step
    mask = (distance >= 0) & (distance < window) & (documents[:, :, None] == documents[:, None])
    return ops.attention(q, k, v, mask)


@pytest.mark.parametrize(("window", "before"), [(1, 0), (2, 3), (4, 11), (9, 3), (40, 0), (40, 11)])
def test_local_attention_in_tiles_is_attention_over_the_whole_row(monkeypatch, window, before):
    """Of packed documents, from a state; outputs, gradients, and the state that goes on."""
    monkeypatch.setattr(import_module("jax_models.ops.causal_attention"), "TILE", 8)
    rng = np.random.default_rng(window)
    time = 30
    q, k, v = (rng.standard_normal((2, time, heads, 6)) for heads in (4, 2, 2))
    reset = np.zeros((2, time), bool)
    reset[0, [13, 17]] = reset[1, 26] = True

    def in_pieces(q, k, v):
        shape = (2, window - 1, 2, 6)
        state = ops.LocalAttentionState(jnp.zeros(2, jnp.int32), jnp.zeros(shape), jnp.zeros(shape))
        outputs = []
        for start, end in ((0, before), (before, time - 1), (time - 1, time)):
            piece = (array[:, start:end] for array in (q, k, v))
            y, state = ops.local_attention(*piece, state, reset=reset[:, start:end])
            outputs.append(y)
        return jnp.concatenate(outputs, axis=1)

    expected = partial(dense_attention, window=window, documents=np.cumsum(reset, axis=1))

    def outputs_and_gradients(f):
        def loss(*args):
            y = f(*args)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)

    with jax.enable_x64(True):
        found, of_whole = outputs_and_gradients(in_pieces), outputs_and_gradients(expected)
        for ours, whole in zip(found, of_whole, strict=True):  # over one key, q has no gradient
            assert_same(ravel_pytree(ours)[0], ravel_pytree(whole)[0], "gradients, then outputs")


@pytest.mark.parametrize(("platform", "tile"), [("cpu", 120), ("tpu", 352)])
def test_the_tile_is_that_of_the_platform_that_a_program_is_lowered_for(platform, tile):
    """And not that of the machine that lowers it."""
    x = jax.ShapeDtypeStruct((2, 700, 1, 16), jnp.float32)
    state = ops.LocalAttentionState(jnp.zeros(2, jnp.int32), *jnp.zeros((2, 2, 255, 1, 16)))
    program = jax.jit(ops.local_attention).trace(x, x, x, state)
    text = program.lower(lowering_platforms=(platform,)).as_text()
    assert f"x{tile}x16xf32" in text
    assert f"x{ {120: 352, 352: 120}[tile] }x16xf32" not in text


@pytest.mark.parametrize(
    ("faulty", "number"), [("q", np.nan), ("k", np.inf), ("v", -np.inf), ("v", np.nan)]
)
def test_only_the_steps_that_see_a_number_that_is_not_finite_know_of_it(
    monkeypatch, faulty, number
):
    """Their heads are NaN; they pass no gradient on."""
    monkeypatch.setattr(import_module("jax_models.ops.causal_attention"), "TILE", 8)
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
            y = ops.local_attention(**arrays, state=state)[0]
            return jnp.sum(jnp.where(touched[None, ..., None], 0, y)), y

        return jax.grad(attend, has_aux=True)(arrays)

    (gradients, y), (of_sound, whole) = run(broken), run(sound)
    assert np.isnan(y[0][touched]).all()
    np.testing.assert_allclose(y[0][~touched], whole[0][~touched], rtol=1e-5, atol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), gradients, of_sound)


def test_tiles_vary_over_the_devices_of_a_mesh():
    """From the state of zeros, which does not."""
    layer = LocalAttention(8, 2, window=3, rngs=nnx.Rngs(0))
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    run = jax.shard_map(lambda x: layer(x)[0], mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    x = jax.ShapeDtypeStruct((2, 300, 8), jnp.float32)
    assert jax.eval_shape(run, x).shape == x.shape


def test_the_memory_of_training_grows_with_time_alone():
    """Not with its square, nor with the window times the time."""
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


SMALL = {
    "vocab_size": 13,
    "features": 8,
    "num_layers": 3,
    "mlp_features": 7,
    "recurrent_features": 6,
    "num_heads": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["hf", "hf-file", "deepmind", "deepmind-torch"])
def test_the_keys_tell_the_model(layout):
    model = random_model(CONFIG, jnp.float32)
    weights = to_torch(model, layout)
    tokens = np.random.default_rng(0).integers(0, 13, (2, 9))
    window = 2048 if layout.startswith("hf") else 2049
    assert GriffinLanguageModelConfig.from_state_dict(weights, window=2048) == CONFIG
    assert griffin_from_weights(weights).config.window == window
    loaded = griffin_from_weights(weights, CONFIG)
    np.testing.assert_array_equal(loaded(tokens)[0], model(tokens)[0])
    for key, array in to_torch(loaded, layout).items():
        np.testing.assert_array_equal(array, weights[key])


def test_other_options_are_told_by_the_keys_too():
    weights = to_torch(random_model(OTHER, jnp.float32))
    assert GriffinLanguageModelConfig.from_state_dict(weights) == OTHER
    with pytest.raises(ValueError, match="has \\['hf', 'hf-file'\\], not 'deepmind'"):
        to_torch(random_model(OTHER, jnp.float32), "deepmind")


@pytest.mark.slow
def test_a_tree_of_flax_variables_is_taken_as_it_is():
    """As recurrentgemma restores it: a block's name has a dot."""
    model = random_model(CONFIG, jnp.float32)
    tree: dict = {}
    for key, array in to_torch(model, "deepmind").items():
        *path, name = key.replace("blocks.", "blocks/").split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part.replace("/", "."), {})
        branch[name] = array
    assert "blocks.0" in tree
    loaded = griffin_from_weights({"params": tree})
    for key, array in to_torch(model).items():
        np.testing.assert_array_equal(to_torch(loaded)[key], array)


OF_2B = {
    "model_type": "recurrent_gemma",
    "vocab_size": 256000,
    "hidden_size": 2560,
    "num_hidden_layers": 26,
    "intermediate_size": 15360,
    "num_attention_heads": 10,
    "num_key_value_heads": 1,
    "lru_width": 2560,
    "attention_window_size": 2048,
    "conv1d_width": 4,
    "logits_soft_cap": 30.0,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "block_types": ["recurrent", "recurrent", "attention"],
}
ROPE = {"partial_rotary_factor": 0.5, "rope_theta": 10000.0}


@pytest.mark.parametrize("rope", [ROPE, {"rope_parameters": {**ROPE, "rope_type": "default"}}])
def test_a_config_json_tells_the_model(rope):
    config = GriffinLanguageModelConfig.from_hf(json.loads(json.dumps(OF_2B | rope)))
    assert config == GriffinLanguageModelConfig(
        vocab_size=256_000, features=2560, num_layers=26, mlp_features=7680,
        recurrent_features=2560, num_heads=10, window=2048,
    )  # fmt: skip
    assert config.mixings[:4] == ["recurrent", "recurrent", "attention", "recurrent"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma"}, "config: model_type:"),
        ({"hidden_activation": "silu"}, "hidden_activation:"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings:"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type:"),
        ({"block_types": ["mamba"]}, "block_types:"),
        ({"hidden_size": "2560"}, "config: hidden_size:"),
        ({"intermediate_size": None}, "config: intermediate_size:"),
    ],
)
def test_a_config_json_of_another_model_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        GriffinLanguageModelConfig.from_hf(OF_2B | change)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: {}, "not a checkpoint of RecurrentGemma: it has no model.embed"),
        (lambda w: {f"module.{k}": a for k, a in w.items()}, 'are under "module.": give'),
        (lambda w: {k: a for k, a in w.items() if ".up_proj" not in k}, "missing key model.layers"),
        (
            lambda w: {
                k: a for k, a in w.items() if k != "model.layers.0.mlp_block.gate_proj.weight"
            },
            "missing key model.layers.0.mlp_block.gate_proj.weight",
        ),
        (lambda w: w | {"lm_head.weight": 0 * w["lm_head.weight"]}, "two different arrays"),
        (lambda w: w | {"model.layers.0.extra": np.ones(2)}, "unexpected key model.layers.0.extra"),
    ],
)
def test_weights_that_do_not_fit_are_refused(edit, message):
    weights = to_torch(random_model(CONFIG, jnp.float32))
    with pytest.raises(ValueError, match=message):
        griffin_from_weights(edit(weights))


def test_weights_beside_a_config_that_contradicts_them_are_refused():
    weights = to_torch(random_model(CONFIG, jnp.float32))
    config = GriffinLanguageModelConfig(**{**SMALL, "mlp_features": 9})
    with pytest.raises(ValueError, match=r"gate_proj\.weight:"):
        griffin_from_weights(weights, config)
    with pytest.raises(TypeError, match="weights:"):
        griffin_from_weights([1])


def test_a_decay_near_1_keeps_its_digits_and_its_gradient_is_bounded():
    """In float32 against float64; where nothing is let in, the square root's slope is 1000."""
    a_param = np.array([-30.0, -9.0, -2.0, 3.0])
    exponent = np.array([[8.0, 4.0, 1e-3, 0.5]])
    with jax.enable_x64(True):
        exact = ops.softplus_decay(a_param, exponent)
        narrow = ops.softplus_decay(a_param.astype(np.float32), exponent.astype(np.float32))
        for ours, expected in zip(narrow, exact, strict=True):
            np.testing.assert_allclose(ours, expected, rtol=floor(np.float32))
        slope = jax.grad(lambda e: ops.softplus_decay(a_param[:1], e)[1][0, 0])(np.zeros((1, 1)))
        assert_same(slope, [[2000 * np.log1p(np.exp(-30.0))]], "slope")


@pytest.mark.parametrize("name", ["attention", "local_attention"])
def test_scores_that_overflow_show_no_later_step(name):
    """A query that sees nothing but scores of −∞ has no softmax."""
    q = jnp.full((1, 3, 1, 1), 1e30)
    v = jnp.arange(3.0).reshape(q.shape)
    if name == "attention":
        y = ops.attention(q, -q, v, jnp.tril(jnp.ones((1, 3, 3), bool)))
    else:
        state = ops.LocalAttentionState(jnp.zeros(1, jnp.int32), *jnp.zeros((2, 1, 2, 1, 1)))
        y, _ = ops.local_attention(q, -q, v, state)
    assert jnp.all(jnp.isnan(y))
