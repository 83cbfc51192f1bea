"""Hyena, attention and the GPModel over them, beyond what the registry checks."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import torch_ref
from jax_models import (
    AuthenticHyenaBlock,
    AuthenticHyenaFilter,
    Constant,
    GPModelConfig,
    HyenaBlock,
    HyenaFilter,
    SelfAttentionBlock,
    from_torch,
    generate,
    to_torch,
)
from jax_models.models.gp import Block
from parity_tests.engine.bounds.tolerance import assert_same, ulp


def random_twin(twin: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(0)
    twin = twin.double()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.normal_(std=0.5)
    return twin


@pytest.mark.parametrize("order", [1, 3])
@pytest.mark.parametrize("kind", ["simple", "explicit", "implicit"])
def test_filters_are_the_twins_at_every_length(x64, kind, order):
    if kind == "simple":
        twin, layer, options = torch_ref.HyenaFilter, HyenaFilter, {}
    else:
        twin, layer = torch_ref.AuthenticHyenaFilter, AuthenticHyenaFilter
        options = {"embed_features": 7, "mlp_features": 5, "implicit": kind == "implicit"}
    twin = random_twin(twin(4, 9, order=order, **options))
    ours = layer(4, 9, order=order, param_dtype=jnp.float64, rngs=nnx.Rngs(0), **options)
    from_torch(ours, twin.state_dict())
    for length in (1, 6, 9):
        assert_same(ours(length), twin(length).detach().numpy(), f"{length} taps")


@pytest.mark.parametrize("implicit", [False, True])
def test_only_what_takes_part_is_trained(implicit):
    """As in the twin, by the names of the seed."""
    twin = torch_ref.AuthenticHyenaBlock(4, 9, embed_features=5, implicit=implicit)
    layer = AuthenticHyenaBlock(4, 9, embed_features=5, implicit=implicit, rngs=nnx.Rngs(0))
    for constant in jax.tree.leaves(
        nnx.state(layer, Constant), is_leaf=lambda x: isinstance(x, Constant)
    ):
        constant.set_value(jnp.full_like(constant.get_value(), jnp.nan))
    trained = {key for key, array in to_torch(layer).items() if np.isfinite(array).all()}
    assert trained == {name for name, w in twin.named_parameters() if w.requires_grad}


def test_initial_filters_are_the_seeds():
    """The windows, times, embedding and frequencies: all that is not drawn."""
    for twin, layer in (
        (torch_ref.HyenaFilter(4, 9), HyenaFilter(4, 9, rngs=nnx.Rngs(0))),
        (torch_ref.AuthenticHyenaFilter(4, 9), AuthenticHyenaFilter(4, 9, rngs=nnx.Rngs(0))),
    ):
        ours = to_torch(layer)
        for key, value in twin.state_dict().items():
            if key.startswith(("window", "pos_emb", "t")) or key.endswith("freq"):
                largest_angle = 2 * np.pi * 15  # which the twin rounds
                error = np.abs(ours[key] - value.numpy()).max()
                assert error <= largest_angle * ulp(np.float32)
        assert ours["h"].std() == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda **k: AuthenticHyenaBlock(4, 9, embed_features=8, **k), "embed_features:"),
        (lambda **k: AuthenticHyenaBlock(4, 9, num_filter_layers=1, **k), "num_filter_layers:"),
        (lambda **k: SelfAttentionBlock(8, 3, **k), "num_heads:"),
    ],
)
def test_bad_options(build, message):
    with pytest.raises(ValueError, match=message):
        build(rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "layer",
    [
        lambda rngs: HyenaBlock(4, 9, rngs=rngs),
        lambda rngs: SelfAttentionBlock(4, 2, max_length=9, rngs=rngs),
    ],
)
def test_sequences_over_the_maximal_length(layer):
    layer = layer(nnx.Rngs(0))
    with pytest.raises(ValueError, match="at most max_length=9 steps, got 10; build the layer"):
        layer(jnp.ones((1, 10, 4)))
    y, state = layer(jnp.ones((1, 6, 4)))
    y, state = layer(jnp.ones((1, 6, 4)), state)
    assert np.isfinite(y[0, :3]).all()
    assert np.isnan(y[0, 3:]).all()
    with pytest.raises(ValueError, match=r"context_length=8"):
        GPModelConfig(context_length=8, features=8, num_layers=1).build(rngs=nnx.Rngs(0))(
            np.zeros((1, 9), int)
        )


@pytest.mark.parametrize("dtypes", [(jnp.float32, jnp.float64), (jnp.float64, jnp.float32)])
def test_a_state_of_another_width_is_taken(x64, dtypes):
    of_state, of_x = dtypes
    layer = HyenaBlock(4, 40, dtype=of_x, rngs=nnx.Rngs(0))
    state = jax.tree.map(
        lambda s: s.astype(of_state) if jnp.issubdtype(s.dtype, jnp.floating) else s,
        layer.init_state(2),
    )
    for time in (1, 3):
        x = jnp.ones((2, time, 4), of_x)
        y, last = jax.eval_shape(layer, x, state)
        y_fresh, _ = jax.eval_shape(layer, x)
        assert y.dtype == y_fresh.dtype
        assert len({s.dtype for s in jax.tree.leaves(last.long) if s.dtype != jnp.int32}) == 1


@pytest.mark.parametrize("block", get_args(Block))
def test_dropout_is_applied_in_training_only(x64, block):
    config = GPModelConfig(
        vocab_size=7,
        context_length=9,
        features=8,
        num_layers=1,
        num_heads=2,
        block=block,
        block_dropout_rate=0.5,
    )
    model = config.build(param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    tokens = np.arange(7)[None]
    forward = nnx.jit(lambda model: model(tokens)[0])
    first, second = forward(model), forward(model)
    assert (first != second).any()
    evaluating = nnx.view(model, deterministic=True)
    without = from_torch(
        GPModelConfig(**{**vars(config), "block_dropout_rate": 0.0}).build(
            param_dtype=jnp.float64, rngs=nnx.Rngs(1)
        ),
        {key: torch.from_numpy(array) for key, array in to_torch(model).items()},
    )
    assert_same(forward(evaluating), forward(without), "evaluating, and a rate of 0")


@pytest.mark.slow
def test_filters_are_computed_once_for_inference(x64, monkeypatch):
    """By `generate` too; and only for what is fixed."""
    config = GPModelConfig(
        vocab_size=11, context_length=40, features=8, num_layers=2, block="authentic-hyena"
    )
    model = config.build(param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, 11, (2, 7))
    logits, state = model(tokens)
    fixed = nnx.view(nnx.view(model, fixed_filters=True), fixed_filters=True)
    computed = []
    original = AuthenticHyenaFilter.network
    monkeypatch.setattr(
        AuthenticHyenaFilter,
        "network",
        lambda self, length: computed.append(length) or original(self, length),
    )
    logits_of_fixed, state_of_fixed = fixed(tokens)
    assert_same(logits_of_fixed, logits, "logits")
    for a, b in zip(*map(jax.tree.leaves, (state_of_fixed, state)), strict=True):
        assert_same(a, b, "state")
    model.blocks[0].filter.alphas[...] *= 2
    assert (fixed(tokens)[0] == logits_of_fixed).all()
    with pytest.raises(NotImplementedError, match="export the model they are of"):
        to_torch(fixed)
    generate(model, tokens, 60, key=jax.random.key(0))
    assert computed == []
