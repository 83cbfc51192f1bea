"""HyenaDNA's filters, its layouts, its config, and what it refuses."""

from functools import partial

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


FILTER = "backbone.layers.0.mixer.filter_fn"
POSITIONS = f"{FILTER}.pos_emb.z"
EDITS = [
    ("expected a mapping", lambda w: [*w]),
    (f"not a checkpoint of HyenaDNA: it has no {EMBEDDING}", lambda w: {}),
    ("in the entry", lambda w: {"state_dict": {f"model.{key}": array for key, array in w.items()}}),
    (f"has no {POSITIONS}", lambda w: {k: a for k, a in w.items() if not k.endswith("pos_emb.z")}),
    ("pos_emb.z:", lambda w: w | {POSITIONS: np.ones((24, 5))}),
    ("pos_emb.z:", lambda w: w | {POSITIONS.replace("0", "1"): np.ones((1, 23, 5))}),
    ("two different arrays", lambda w: w | {(k := f"{FILTER}.implicit_filter.3.freq"): w[k] + 1}),
    ("unexpected key", lambda w: w | {"backbone.layers.0.mixer.ord_proj_w": np.ones((3, 1, 1))}),
]


@pytest.mark.parametrize(("message", "edit"), EDITS)
def test_what_is_no_such_checkpoint_is_refused(message, edit):
    weights = to_torch(CONFIG.build(rngs=nnx.Rngs(0)))
    with pytest.raises((TypeError, ValueError), match=message):
        hyena_dna_from_weights(edit(weights))


@pytest.mark.parametrize(
    ("argument", "build"),
    [
        ("order:", partial(HyenaDNAMixer, 4, 8, order=1)),
        ("embed_features:", partial(HyenaDNAFilter, 4, 8, embed_features=4)),
        ("num_filter_layers:", partial(HyenaDNAFilter, 4, 8, num_filter_layers=1)),
    ],
)
def test_refuses(argument, build):
    with pytest.raises(ValueError, match=argument):
        build(rngs=nnx.Rngs(0))
