"""HyenaDNA's filters, its layouts, its config, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_models import (
    HyenaDNAFilter,
    HyenaDNALanguageModelConfig,
    HyenaDNAMixer,
    from_torch,
    generate,
    hyena_dna_from_weights,
    to_torch,
)
from parity_tests.engine.bounds.tolerance import assert_same

CONFIG = HyenaDNALanguageModelConfig(
    vocab_size=11,
    context_length=24,
    features=6,
    num_layers=2,
    mlp_features=9,
    order=3,
    embed_features=5,
    filter_features=7,
    num_filter_layers=3,
)
EMBEDDING = "backbone.embeddings.word_embeddings.weight"
TOKENS = np.random.default_rng(0).integers(0, 11, (2, 9))


def model_of(config=CONFIG, seed=0):
    model = config.build(param_dtype=jnp.float64, rngs=nnx.Rngs(seed))
    rng = np.random.default_rng(seed)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape), params))
    return model


def test_the_filter_begins_as_in_hyena_dna(x64):
    """Positions, times and decays by the formulas of its paper's code."""
    length, bands = 20, 3
    layer = HyenaDNAFilter(
        5, length, order=2, embed_features=7, param_dtype=jnp.float64, rngs=nnx.Rngs(0)
    )
    t = np.arange(length) / (length - 1)
    f = np.linspace(1e-4, bands - 1, bands)
    z = np.exp(-2j * np.pi * np.outer(np.arange(length), f) / length)
    assert_same(layer.z[...], np.concatenate([t[:, None], z.real, z.imag], axis=1), "z")
    assert_same(layer.t[...], t, "t")
    slow, fast = np.log(0.01) / 1.5, np.log(0.01) / 0.3
    assert_same(layer.deltas[...].ravel(), np.linspace(slow, fast, 10), "deltas")
    assert (layer.freq[...] == 10).all()


@pytest.mark.slow
def test_safari_numbers_the_features_of_several_filters_in_another_order(x64):
    """Feature by feature, where the standalone file has filter by filter."""
    order, features = 4, 5
    layer = HyenaDNAMixer(
        features, 16, order=order, mlp_features=6, param_dtype=jnp.float64, rngs=nnx.Rngs(0)
    )
    weights = to_torch(layer, "hyena-dna")
    numbers = np.arange((order - 1) * features).reshape(order - 1, features)
    place = numbers.T.ravel()
    turned = {
        "filter_fn.bias": lambda a: a[place],
        "filter_fn.implicit_filter.6.weight": lambda a: a[place],
        "filter_fn.modulation.deltas": lambda a: a[..., place],
    }
    expected = weights | {key: turn(weights[key]) for key, turn in turned.items()}
    exported = to_torch(layer, "safari")
    assert exported.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(exported[key], array, err_msg=key)
    again = HyenaDNAMixer(
        features, 16, order=order, mlp_features=6, param_dtype=jnp.float64, rngs=nnx.Rngs(1)
    )
    x = np.random.default_rng(0).standard_normal((2, 9, features))
    np.testing.assert_array_equal(from_torch(again, exported, "safari")(x)[0], layer(x)[0])


@pytest.mark.slow
@pytest.mark.parametrize("tied_head", [True, False])
def test_every_layout_is_read_with_the_config_of_its_shapes(x64, tied_head):
    config = HyenaDNALanguageModelConfig(**{**vars(CONFIG), "tied_head": tied_head})
    model = model_of(config)
    logits = model(TOKENS)[0]
    layouts = [*model.torch_layouts()]
    assert ("hyena-dna" in layouts) == tied_head
    for layout in layouts:
        weights = to_torch(model, layout)
        port = hyena_dna_from_weights(weights, param_dtype=jnp.float64)
        assert port.config == config, layout
        np.testing.assert_array_equal(port(TOKENS)[0], logits, err_msg=layout)


@pytest.mark.slow
def test_a_model_with_dropout_drops_in_training_alone(x64):
    rates = {"block_dropout_rate": 0.2, "embedding_dropout_rate": 0.1}
    weights = to_torch(model_of())
    model = hyena_dna_from_weights(
        weights, HyenaDNALanguageModelConfig(**{**vars(CONFIG), **rates}), param_dtype=jnp.float64
    )
    assert (model(TOKENS)[0] != model(TOKENS)[0]).any()
    model.eval()
    np.testing.assert_array_equal(model(TOKENS)[0], model_of()(TOKENS)[0])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: [*w], "state_dict: expected a mapping, got list"),
        (lambda w: {}, f"state_dict: not of a HyenaDNA, it has no {EMBEDDING}"),
        (
            lambda w: {"state_dict": {f"model.{key}": a for key, a in w.items()}},
            r'its weights are under "state_dict.model\.|are in the entry|under "model\."',
        ),
        (
            lambda w: {key: a for key, a in w.items() if not key.endswith("pos_emb.z")},
            r"has no backbone.layers.0.mixer.filter_fn.pos_emb.z",
        ),
        (
            lambda w: w | {"backbone.layers.0.mixer.filter_fn.pos_emb.z": np.ones((24, 5))},
            r"pos_emb.z: expected 3 axes, got \(24, 5\)",
        ),
        (
            lambda w: w | {"backbone.layers.1.mixer.filter_fn.pos_emb.z": np.ones((1, 23, 5))},
            r"layers.1.mixer.filter_fn.pos_emb.z: expected shape \(1, 24, 5\)",
        ),
        (
            lambda w: {
                key: a + 1 if key.endswith("layers.1.mixer.filter_fn.implicit_filter.3.freq") else a
                for key, a in w.items()
            },
            r"implicit_filter.3.freq: two different arrays",
        ),
        (
            lambda w: w | {"backbone.layers.0.mixer.ord_proj_w": np.ones((3, 1, 1))},
            "unexpected key backbone.layers.0.mixer.ord_proj_w",
        ),
    ],
)
def test_what_is_no_such_checkpoint_is_refused(edit, message):
    weights = to_torch(CONFIG.build(rngs=nnx.Rngs(0)))
    with pytest.raises((TypeError, ValueError), match=message):
        hyena_dna_from_weights(edit(weights))


def test_what_a_long_convolution_cannot_do_is_refused():
    model = CONFIG.build(rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="tokens: expected at most context_length=24 steps"):
        model(np.zeros((1, 25), int))
    with pytest.raises(NotImplementedError, match="reset: a long convolution cannot keep"):
        model(TOKENS, reset=np.zeros(TOKENS.shape, bool))
    for build, message in (
        (lambda **o: HyenaDNAMixer(4, 8, order=1, **o), "order: expected at least 2, got 1"),
        (lambda **o: HyenaDNAFilter(4, 8, embed_features=4, **o), "embed_features: expected an od"),
        (lambda **o: HyenaDNAFilter(4, 8, num_filter_layers=1, **o), "num_filter_layers: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            build(rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_a_text_goes_on_past_the_context(x64):
    """By steps up to context_length, and then over a window that slides."""
    model = model_of()
    tokens = np.asarray(generate(model, TOKENS, 40, key=jax.random.key(0)))
    whole = jax.jit(lambda window: model(window)[0])
    text = TOKENS
    for i, key in enumerate(jax.random.split(jax.random.key(0), 40)):
        window = text[:, -24:]
        padded = np.pad(window, ((0, 0), (0, 24 - window.shape[1])))
        logits = whole(padded)[:, window.shape[1] - 1]
        text = np.concatenate([text, jax.random.categorical(key, logits)[:, None]], axis=1)
        assert (text[:, -1] == tokens[:, i]).all(), i
