"""Weights in memory are loaded as those in files are."""

from dataclasses import replace

import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from published import GRIFFIN, assert_same_weights, weights_of

from jax_models import from_weights, to_torch


@pytest.mark.slow
def test_a_tree_of_flax_is_read():
    weights = weights_of(GRIFFIN, "deepmind")
    tree = unflatten_dict(weights, sep=".")
    for given in (tree, {"params": tree}):
        for config in (None, GRIFFIN):
            assert_same_weights(to_torch(from_weights(given, config), "deepmind"), weights)


def test_a_field_replaces_that_of_the_config():
    assert from_weights(weights_of(GRIFFIN), GRIFFIN, window=9).config == replace(GRIFFIN, window=9)


def test_what_is_no_model_is_refused():
    weights = weights_of(GRIFFIN)
    for wrong, fields, message in (
        ({"epoch": 3, "model": weights}, {}, "state_dict: .*give state_dict"),
        ({"model": weights, "optimizer": {}}, {}, "state_dict: .*give state_dict"),
        ({"a": np.ones(3)}, {}, "state_dict: expected one of "),
        ([1], {}, "weights: expected a mapping"),
        (weights, {"num_kv_heads": 0}, "num_kv_heads: expected a positive integer, got 0$"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            from_weights(wrong, **fields)
