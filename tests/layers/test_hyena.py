"""Hyena, attention and the GPModel that uses them, beyond the checks of the registry."""

import dataclasses
import re
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import torch_ref
from jax_models import (
    AuthenticHyenaFilter,
    GPModelConfig,
    HyenaBlock,
    HyenaDNAFilter,
    HyenaDNAMixer,
    HyenaFilter,
    from_torch,
    generate,
    to_torch,
)
from jax_models.models.gp import Block
from parity_tests.engine.bounds.tolerance import assert_same, ulp


def test_initial_filters_are_the_seeds():
    """Windows, times, embeddings and frequencies are equal, because they are not random."""
    for twin, layer in (
        (torch_ref.HyenaFilter(4, 9), HyenaFilter(4, 9, rngs=nnx.Rngs(0))),
        (torch_ref.AuthenticHyenaFilter(4, 9), AuthenticHyenaFilter(4, 9, rngs=nnx.Rngs(0))),
    ):
        ours = to_torch(layer)
        for key, value in twin.state_dict().items():
            if key.startswith(("window", "pos_emb", "t")) or key.endswith("freq"):
                largest_angle = 2 * np.pi * 15  # the twin rounds it
                error = np.abs(ours[key] - value.numpy()).max()
                assert error <= largest_angle * ulp(np.float32)
        assert ours["h"].std() == pytest.approx(1, abs=0.3)


def test_sequences_over_the_maximal_length():
    """`test_attention.py` tests those of attention."""
    layer = HyenaBlock(4, 9, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="at most max_length=9 steps, got 10"):
        layer(jnp.ones((1, 10, 4)))
    _, state = jax.jit(layer.__call__)(jnp.ones((1, 6, 4)))
    y, _ = jax.jit(layer.__call__)(jnp.ones((1, 6, 4)), state)
    assert np.isfinite(y[0, :3]).all()
    assert np.isnan(y[0, 3:]).all()


@pytest.mark.parametrize("dtypes", [(jnp.float32, jnp.float64), (jnp.float64, jnp.float32)])
def test_a_state_of_another_width_is_taken(x64, dtypes):
    of_state, of_x = dtypes
    other, layer = (HyenaBlock(4, 40, dtype=dtype, rngs=nnx.Rngs(0)) for dtype in dtypes)
    for time in (1, 3):
        x = jnp.ones((2, time, 4), of_x)
        _, state = jax.eval_shape(other, jnp.ones((2, time, 4), of_state))
        y, last = jax.eval_shape(layer, x, state)
        assert y.dtype == jax.eval_shape(layer, x)[0].dtype
        assert len({s.dtype for s in jax.tree.leaves(last.long) if s.dtype != jnp.int32}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("block", get_args(Block))
def test_dropout_is_applied_in_training_only(x64, block):
    sizes = {"vocab_size": 7, "context_length": 9, "features": 8, "num_layers": 1, "num_heads": 2}
    config = GPModelConfig(**sizes, block=block, block_dropout_rate=0.5)
    model = config.build(param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    forward = nnx.jit(lambda model: model(np.arange(7)[None])[0])
    assert (forward(model) != forward(model)).any()
    without = dataclasses.replace(config, block_dropout_rate=0.0)
    without = without.build(param_dtype=jnp.float64, rngs=nnx.Rngs(1))
    without = from_torch(without, to_torch(model))
    evaluating = nnx.view(model, deterministic=True)
    assert_same(forward(evaluating), forward(without), "evaluating, and a rate of 0")


@pytest.mark.slow
def test_filters_are_computed_once_for_inference(x64, monkeypatch):
    """Changes of the parameters have no effect on fixed filters. `generate` fixes them, too."""
    config = GPModelConfig(
        vocab_size=11, context_length=40, features=8, num_layers=2, block="authentic-hyena"
    )
    model = config.build(param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, 11, (2, 7))
    call = nnx.jit(lambda model, tokens: model(tokens))
    logits, state = call(model, tokens)
    fixed = nnx.view(nnx.view(model, fixed_filters=True), fixed_filters=True)
    computed = []
    original = AuthenticHyenaFilter.network
    monkeypatch.setattr(
        AuthenticHyenaFilter,
        "network",
        lambda self, length: computed.append(length) or original(self, length),
    )
    logits_of_fixed, state_of_fixed = call(fixed, tokens)
    assert_same(logits_of_fixed, logits, "logits")
    for a, b in zip(*map(jax.tree.leaves, (state_of_fixed, state)), strict=True):
        assert_same(a, b, "state")
    model.blocks[0].filter.alphas[...] *= 2
    assert (call(fixed, tokens)[0] == logits_of_fixed).all()
    with pytest.raises(NotImplementedError, match="export the model they are of"):
        to_torch(fixed)
    generate(model, tokens, 60, key=jax.random.key(0))
    assert computed == []


def test_the_filter_begins_as_in_hyena_dna(x64):
    """Positions, times and decays follow the formulas in the code of the paper."""
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


def test_safari_numbers_the_features_of_several_filters_in_another_order():
    """Safari orders by feature first, the standalone file by filter first."""
    layer = HyenaDNAMixer(5, 16, order=4, mlp_features=6, rngs=nnx.Rngs(0))
    exported, place = to_torch(layer, "safari"), np.arange(15).reshape(3, 5).T.ravel()
    for key, array in to_torch(layer, "hyena-dna").items():
        turned = re.fullmatch(
            r"filter_fn\.(bias|implicit_filter\.6\.weight|modulation\.deltas)", key
        )
        axis = -1 if "deltas" in key else 0
        expected = array.take(place, axis) if turned else array
        np.testing.assert_array_equal(exported[key], expected, key)
