"""Compares Griffin with DeepMind's recurrentgemma, in PyTorch and in Flax."""

import dataclasses
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from peers import assert_same_logits_and_gradients, assert_same_start, randomise

from jax_models import GriffinLanguageModelConfig, from_weights, to_torch
from parity_tests.engine.bounds.tolerance import K, floor, rms

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("peers")]

CONFIG = GriffinLanguageModelConfig(
    vocab_size=50,
    features=32,
    mlp_features=40,
    num_heads=4,
    num_layers=5,
    recurrent_features=32,
    window=8,
)
TIME = 21
TOKENS = np.random.default_rng(0).integers(1, 50, (2, TIME))


@pytest.fixture(scope="module")
def deepminds() -> Any:
    """Imports recurrentgemma without its type checks, which need an old typeguard."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typeguard.typechecked", lambda function: function)
        package = pytest.importorskip("recurrentgemma", exc_type=ImportError)
        import_module("recurrentgemma.torch")
    return package


def deepminds_config(package: Any, config: GriffinLanguageModelConfig = CONFIG) -> Any:
    kinds = package.common.TemporalBlockType
    return package.common.GriffinConfig(
        vocab_size=config.vocab_size,
        width=config.features,
        mlp_expanded_width=config.mlp_features,
        num_heads=config.num_heads,
        block_types=tuple(kinds[kind.upper()] for kind in config.mixings),
        embeddings_scale_by_sqrt_dim=config.scale_embeddings,
        attention_window_size=config.window - 1,
        logits_soft_cap=config.logits_soft_cap,
        lru_width=config.recurrent_features,
    )


RESTARTS = np.zeros(TOKENS.shape, bool)
RESTARTS[0, 9] = RESTARTS[1, [2, 15]] = True
POSITIONS = np.stack([np.r_[:9, :12], np.r_[:2, :13, :6]])


@pytest.mark.parametrize("options", [{}, {"scale_embeddings": False, "logits_soft_cap": 0.0}])
def test_recurrentgemma_in_torch_agrees_on_packed_documents(deepminds, options):
    """Compares logits and gradients, with the keys of its PyTorch checkpoints."""
    config = dataclasses.replace(CONFIG, **options)
    sizes = deepminds_config(deepminds, config)
    model = deepminds.torch.Griffin(sizes, gradient_checkpointing=False)
    randomise(model.double())
    assert_same_logits_and_gradients(
        model,
        partial(from_weights, config=config),
        TOKENS,
        "deepmind-torch",
        call=lambda port, tokens: port(tokens, reset=RESTARTS)[0],
        call_twin=lambda model, tokens: model(tokens, torch.tensor(POSITIONS))[0],
    )


def test_parameters_start_as_in_recurrentgemma_in_torch(deepminds):
    """Its Flax version draws block-diagonal gates and the MLPs' first matrices more narrowly."""
    sizes = {"vocab_size": 200, "features": 64, "mlp_features": 96, "recurrent_features": 128}
    config = dataclasses.replace(CONFIG, **sizes)
    torch.manual_seed(0)
    original = deepminds.torch.Griffin(deepminds_config(deepminds, config))
    original.reset_parameters()
    ours = to_torch(config.build(rngs=nnx.Rngs(0)), "deepmind-torch")
    assert_same_start(ours, original.state_dict())


def test_recurrentgemma_in_flax_agrees(deepminds):
    """Loads the tree of its parameters. Its softmax is in float32."""
    model = deepminds.jax.Griffin(deepminds_config(deepminds), gradient_checkpointing=False)
    positions = np.broadcast_to(np.arange(TIME), TOKENS.shape)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        params = model.init(jax.random.key(0), TOKENS, positions)
        rng = np.random.default_rng(0)
        params = jax.tree.map(
            lambda p: jnp.asarray(p + 0.3 * rng.standard_normal(p.shape), jnp.float32), params
        )
        original, _ = model.apply(params, TOKENS, positions)
        params = jax.device_get(params)
        told = from_weights(params).config
        assert told == dataclasses.replace(CONFIG, window=2049)
        port = from_weights(params, CONFIG)
        logits, _ = port(TOKENS)
    with jax.enable_x64(True):
        exact = np.asarray(from_weights(params, CONFIG, param_dtype=jnp.float64)(TOKENS)[0])
    # Neither of the two float32 results exceeds the bound from the other's error.
    errors = [rms(np.asarray(a, np.float64) - exact) / rms(exact) for a in (logits, original)]
    assert max(errors) <= max(floor(np.float32), K * min(errors)), f"ours and original: {errors}"
