"""Compares Gated DeltaNet and the short convolution with transformers' layers."""

import importlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_models import GatedDeltaNet, SequenceLayer, ShortConvolution, from_torch, to_torch
from parity_tests import assert_parity
from parity_tests.engine.bounds.tolerance import assert_same
from parity_tests.engine.bounds.torch_rounding import InFloat64
from parity_tests.engine.problem import in_every_dtype

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("peers")]

FEATURES, TIME, PADDING = 12, 75, 7
X = np.random.default_rng(0).standard_normal((2, TIME, FEATURES))
SIZES: dict[str, Any] = {
    "num_key_heads": 2,
    "num_value_heads": 6,
    "key_features": 5,
    "value_features": 3,
}
OPTIONS: dict[str, Any] = {
    "hidden_size": FEATURES,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 3,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "rms_norm_eps": 1e-3,
}
OLMO = partial(GatedDeltaNet, FEATURES, **SIZES, negative_eigenvalues=True, epsilon=1e-5)
PEERS: dict[str, tuple[str, str, str, dict[str, Any], Any]] = {
    "qwen3_5": (
        "qwen3_5",
        "Qwen3_5GatedDeltaNet",
        "Qwen3_5TextConfig",
        OPTIONS,
        partial(GatedDeltaNet, FEATURES, **SIZES, epsilon=1e-3),
    ),
    "qwen3_next": (
        "qwen3_next",
        "Qwen3NextGatedDeltaNet",
        "Qwen3NextConfig",
        OPTIONS,
        partial(GatedDeltaNet, FEATURES, **SIZES, epsilon=1e-3),
    ),
    "olmo_hybrid": ("olmo_hybrid", "OlmoHybridGatedDeltaNet", "OlmoHybridConfig", OPTIONS, OLMO),
} | {
    f"lfm2, use_bias={bias}": (
        "lfm2",
        "Lfm2ShortConv",
        "Lfm2Config",
        {"hidden_size": FEATURES, "conv_bias": bias, "num_hidden_layers": 1}
        | {"layer_types": ["conv"], "conv_L_cache": taps},
        partial(ShortConvolution, FEATURES, use_bias=bias, kernel_size=taps),
    )
    for bias, taps in ((False, 3), (True, 4))
}
"""The model, its layer, its config class and options, and our layer."""


def config_of(name: str) -> Any:
    model, _, kind, options, _ = PEERS[name]
    path = f"transformers.models.{model}.configuration_{model}"
    pytest.importorskip("transformers")
    return getattr(importlib.import_module(path), kind)(**options)


def randomized(module: Any) -> Any:
    """The module in float64, with random weights."""
    rng = np.random.default_rng(1)
    for parameter in module.double().parameters():
        draw = rng.standard_normal(tuple(parameter.shape))
        scale = 0.5 if parameter.ndim == 1 else parameter[0].numel() ** -0.5
        parameter.data = torch.from_numpy(in_every_dtype(scale * draw))
    return module.eval()


def peer(name: str) -> Any:
    """The layer of transformers, with random weights in float64."""
    config = config_of(name)
    model, kind, *_ = PEERS[name]
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    return randomized(getattr(module, kind)(config, layer_idx=0))


def port(name: str, weights: Any, dtype: Any = jnp.float64) -> SequenceLayer:
    with jax.enable_x64(True):
        layer = nnx.eval_shape(lambda: PEERS[name][-1](param_dtype=dtype, rngs=nnx.Rngs(0)))
        return from_torch(layer, weights)


@pytest.mark.parametrize("name", PEERS)
def test_outputs_and_gradients_are_those_of_transformers(name):
    layer = peer(name)
    for dtype in ("float64", "float32"):
        weights = {key: w.to(getattr(torch, dtype)) for key, w in layer.state_dict().items()}
        ours, layout = port(name, weights, dtype), PEERS[name][0]
        jax.tree.map(np.testing.assert_array_equal, to_torch(ours, layout), weights)
        assert_parity(
            layer, ours, X, weights=layout, call=lambda layer, x: layer(x)[0], dtypes=[dtype]
        )


@pytest.mark.parametrize("name", PEERS)
def test_pieces_and_steps_are_those_of_transformers(name):
    layer, config = peer(name), config_of(name)
    ours = port(name, layer.state_dict())
    cache = pytest.importorskip("transformers").DynamicCache(config=config)
    pieces = [41, 23, *[1] * (TIME - 64)]
    with torch.no_grad(), InFloat64():
        x = torch.from_numpy(X)
        whole = layer(x).numpy()
        expected = torch.cat([layer(part, cache=cache) for part in x.split(pieces, dim=1)], dim=1)
    assert_same(expected.numpy(), whole, "their pieces")
    with jax.enable_x64(True):
        state, outputs, step = None, [], jax.jit(ours.step)
        for part in np.split(X, np.cumsum(pieces)[:-1], axis=1):
            if part.shape[1] > 1:
                y, state = ours(part, state)
            else:
                y, state = step(part[:, 0], state)
                y = y[:, None]
            outputs.append(y)
    assert_same(np.concatenate(outputs, axis=1), whole, "our pieces")


@pytest.mark.parametrize("name", PEERS)
def test_left_padding_has_no_influence(name):
    """In transformers, the short convolution with biases lets the padding in; ours does not."""
    layer = peer(name)
    ours = port(name, layer.state_dict())
    mask, reset = np.ones((2, TIME)), np.zeros((2, TIME), bool)
    mask[1, :PADDING], reset[1, PADDING] = 0, True
    with torch.no_grad(), InFloat64():
        alone = layer(torch.from_numpy(X[1:, PADDING:])).numpy()
        padded = layer(torch.from_numpy(X), attention_mask=torch.from_numpy(mask)).numpy()
    error = np.abs(padded[1:, PADDING:] - alone).max() / np.abs(alone).max()
    assert error > 0.01 if "True" in name else error < 1e-12
    with jax.enable_x64(True):
        y, _ = ours(X, reset=reset)
    assert_same(y[1:, PADDING:], alone, "our padded row")
    assert_same(y[0], padded[0], "the row without padding")


def test_olmo_hybrids_files_are_read_and_written(tmp_path):
    """The files of transformers have the convolution in equal thirds, others by q, k and v."""
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    sizes = {"intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 11}
    config = transformers.OlmoHybridConfig(**OPTIONS | sizes, pad_token_id=0)
    model = randomized(transformers.OlmoHybridForCausalLM(config))
    model.save_pretrained(tmp_path)
    start = "model.layers.0.linear_attn."
    stored = {
        key.removeprefix(start): value
        for key, value in safetensors.load_file(tmp_path / "model.safetensors").items()
        if key.startswith(start)
    }
    assert [len(stored[f"{x}_conv1d.weight"]) for x in "qkv"] == [13, 13, 12]
    ours = port("olmo_hybrid", stored)
    expected = {
        key.removeprefix(start): value.numpy()
        for key, value in model.state_dict().items()
        if key.startswith(start)
    }
    jax.tree.map(np.testing.assert_array_equal, to_torch(ours, "olmo_hybrid"), expected)
    jax.tree.map(np.testing.assert_array_equal, to_torch(ours, "olmo_hybrid-file"), stored)
    by_part = torch.from_numpy(expected["conv1d.weight"]).split([10, 10, 18])
    divided = {f"{x}_conv1d.weight": part for x, part in zip("qkv", by_part, strict=True)}
    ours = port("olmo_hybrid", stored | divided)
    jax.tree.map(np.testing.assert_array_equal, to_torch(ours, "olmo_hybrid"), expected)
    message = (
        r"q_conv1d.weight, k_conv1d.*: to_jax gives shape \(4, 36\), the parameter has \(4, 38"
    )
    with pytest.raises(ValueError, match=message):
        port("olmo_hybrid", stored | divided | {"v_conv1d.weight": by_part[2][2:]})
