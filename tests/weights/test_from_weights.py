"""Weights in memory are loaded as those in files are."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from published import (
    FAMILIES,
    GRIFFIN,
    MODELS,
    assert_same_weights,
    fields_without_shape,
    weights_of,
)

from jax_models import from_weights, to_torch


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_recognized(name):
    config = MODELS[name]
    weights = weights_of(config)
    given = from_weights(weights, config)
    read = from_weights(weights, **fields_without_shape(config))
    assert given.config == read.config == config
    for model in (given, read):
        assert_same_weights(to_torch(model), weights)


def tree_of(weights):
    """The variables of a Flax model, given its weights by keys with dots."""
    tree = {}
    for key, array in weights.items():
        *path, name = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[name] = array
    return tree


@pytest.mark.slow
def test_a_tree_of_flax_is_read():
    weights = weights_of(GRIFFIN, "deepmind")
    for tree in (tree_of(weights), {"params": tree_of(weights)}):
        for config in (None, GRIFFIN):
            assert_same_weights(to_torch(from_weights(tree, config), "deepmind"), weights)


def test_a_field_replaces_that_of_the_config():
    assert from_weights(weights_of(GRIFFIN), GRIFFIN, window=9).config == replace(GRIFFIN, window=9)


@pytest.mark.slow
def test_parameters_get_the_widest_dtype_or_that_of_the_caller():
    config = MODELS["RWKV7LanguageModel"]
    weights = {key: array.astype(jnp.bfloat16) for key, array in weights_of(config).items()}
    assert {array.dtype for array in to_torch(from_weights(weights)).values()} == {
        jnp.dtype("bfloat16")
    }
    model = from_weights(weights, param_dtype="float32", dtype="bfloat16")
    assert {array.dtype for array in to_torch(model).values()} == {jnp.dtype("float32")}
    assert model(jnp.zeros((1, 2), int))[0].dtype == jnp.bfloat16


def test_what_is_no_model_is_refused():
    weights = weights_of(GRIFFIN)
    for wrong, message in (
        ({"epoch": 3, "model": weights}, "state_dict: .*give state_dict"),
        ({"model": weights, "optimizer": {}}, "state_dict: .*give state_dict"),
        ({"a": np.ones(3)}, "state_dict: expected one of "),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            from_weights(wrong)
    with pytest.raises(TypeError, match=r"^weights: expected a mapping"):
        from_weights([1])
