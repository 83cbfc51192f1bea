"""RWKV-4, 6 and 7 beyond parity: their checkpoints, layouts and initialization."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_models import (
    RWKV6LanguageModelConfig,
    RWKV7LanguageModelConfig,
    RWKV7TimeMix,
    RWKVLanguageModelConfig,
    from_torch,
    from_weights,
    to_torch,
)
from parity_tests.registry import CASES

MODELS = {
    "RWKV-4": CASES["RWKVLanguageModel"].config,
    "RWKV-6": CASES["RWKV6LanguageModel"].config,
    "RWKV-7": CASES["RWKV7LanguageModel"].config,
}
ATT = "blocks.0.att"


def checkpoint(version: str, dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    """The state_dict of a random model, with BlinkDL's keys."""
    weights = to_torch(MODELS[version].build(rngs=nnx.Rngs(0)))
    return {key: 0.4 * torch.randn(value.shape).to(dtype) for key, value in weights.items()}


def test_what_fla_makes_of_rwkv6():
    """The expected keys are those of fla's converter."""
    weights = {k: v.numpy() for k, v in checkpoint("RWKV-6", torch.float32).items()}
    fla = to_torch(from_weights(weights), "fla")
    of = lambda name: weights[f"{ATT}.time_{name}"]  # noqa: E731
    w, k, v, r, g = np.split(of("maa_w1"), 5, axis=1)
    w2, k2, v2, r2, g2 = of("maa_w2")
    for key, expected in {
        "attn.x_proj.0.linear.weight": np.concatenate([r, w, k, v, g], axis=1).T,
        "attn.x_proj.2.weight": np.concatenate([r2, w2, k2, v2, g2]).T,
        "attn.x_bias": [of(f"maa_{name}")[0, 0] for name in "rwkvg"],
        "attn.w_proj.linear.lora.0.weight": of("decay_w1").T,
        "attn.w_proj.linear.lora.2.weight": of("decay_w2").T,
        "attn.w_proj.linear.lora.2.bias": of("decay")[0, 0],
        "ffn.receptance.mu": weights["blocks.0.ffn.time_maa_r"][0, 0],
    }.items():
        np.testing.assert_array_equal(fla[f"model.layers.0.{key}"], expected, key)


def test_what_fla_makes_of_rwkv7():
    weights = {k: v.numpy() for k, v in checkpoint("RWKV-7", torch.float32).items()}
    fla = to_torch(from_weights(weights), "fla")
    for name in "wav":
        ours, lora = f"blocks.1.att.{name}", f"model.layers.1.attn.{name}_lora.lora"
        np.testing.assert_array_equal(fla[f"{lora}.0.weight"], weights[f"{ours}1"].T)
        np.testing.assert_array_equal(fla[f"{lora}.2.weight"], weights[f"{ours}2"].T)
        np.testing.assert_array_equal(fla[f"{lora}.2.bias"], weights[f"{ours}0"][0, 0])
    assert fla["model.layers.1.attn.x_r"].shape == (1, 1, 6)
    assert fla["model.layers.1.ffn.x_k"].shape == (6,)
    assert "model.layers.0.pre_norm.weight" in fla
    absent = ("layers.0.attn.v_lora", "attn.g_lora.lora.2.bias")
    assert not any(part in key for key in fla for part in absent)


@pytest.mark.slow
def test_the_lowest_layer_may_have_values_that_it_does_not_use():
    weights = checkpoint("RWKV-7", torch.float32)
    more = {f"{ATT}.v{i}": weights[f"blocks.1.att.v{i}"] + 1 for i in range(3)}
    model, without = from_weights(weights | more), from_weights(weights)
    back = to_torch(model)
    assert back.keys() == weights.keys() | more.keys()
    for key, tensor in more.items():
        np.testing.assert_array_equal(back[key], tensor)
    tokens = jnp.arange(11)[None]
    np.testing.assert_array_equal(model(tokens)[0], without(tokens)[0])
    trained = nnx.state(model.blocks[0].att, nnx.Param)
    assert {"v0", "v1", "v2"}.isdisjoint(trained)


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("RWKV-5", [f"{ATT}.ln_x.weight", f"{ATT}.time_decay"]),
        ("RWKV-6a", [f"{ATT}.time_maa_x", f"{ATT}.gate_w1"]),
        ("an early RWKV-7", [f"{ATT}.time_maa_r", f"{ATT}.time_aaaaa"]),
        ("an early RWKV-7", [f"{ATT}.xx_r", f"{ATT}.kk_s"]),
        ("an early RWKV-7", [f"{ATT}.x_r", f"{ATT}.w0"]),
        ("RWKV-7a", [f"{ATT}.r_k", "blocks.0.ffn.s_emb.weight"]),
        ("RWKV-7a", [f"{ATT}.r_k", "blocks.0.ffn.s0"]),
        ("RWKV-7b", [f"{ATT}.r_k", "blocks.0.qkv.qq.weight"]),
        ("RWKV-8", [f"{ATT}.r_k", "blocks.0.ffn.enn.weight"]),
        (
            "a hybrid of an RWKV and a transformer",
            ["model.layers.0.self_attn.r_k", "model.layers.0.mlp.gate_proj.weight"],
        ),
        ("a file converted by the rwkv package", [f"{ATT}.r_k", "_strategy"]),
        ("another model", ["lstm.weight_ih_l0"]),
    ],
)
def test_what_there_is_no_model_of_is_refused_by_name(name, extra):
    weights = {key: torch.zeros(6, 6) for key in ("emb.weight", *extra)}
    with pytest.raises(ValueError, match=rf"expected one of .*RWKV-7, .*, got {name}"):
        from_weights(weights)


@pytest.mark.parametrize(("version", "other"), [*itertools.permutations(MODELS, 2)])
def test_a_model_names_the_version_that_it_is_not(version, other):
    config, weights = MODELS[version], checkpoint(other)
    model = nnx.eval_shape(lambda: config.build(rngs=nnx.Rngs(0)))
    for call in (lambda: from_torch(model, weights), lambda: type(config).from_state_dict(weights)):
        with pytest.raises(ValueError, match=rf"of {other} \(it has .*\), this model is {version}"):
            call()


def singular_values(kernel):
    return np.linalg.svd(np.asarray(kernel), compute_uv=False)


def test_rwkv4_starts_as_the_official_code():
    config = RWKVLanguageModelConfig(vocab_size=9, features=16, num_layers=4, hidden_features=64)
    model = config.build(rngs=nnx.Rngs(0))
    n = np.arange(16)
    f = n / 16
    for layer, block in enumerate(model.blocks):
        att, ffn = block.att, block.ffn
        rho, lam = 1 - layer / 4, layer / 3
        expected = {
            "time_decay": -5 + 8 * (n / 15) ** (0.7 + 1.3 * lam),
            "time_first": np.log(0.3) + ((n + 1) % 3 - 1) * 0.5,
            "time_mix_k": f**rho,
            "time_mix_v": f**rho + 0.3 * lam,
            "time_mix_r": f ** (rho / 2),
        }
        for name, value in expected.items():
            np.testing.assert_allclose(getattr(att, name)[...], value, rtol=1e-5, atol=1e-6)
        for mix in (ffn.time_mix_k, ffn.time_mix_r):
            np.testing.assert_allclose(mix[...], f**rho, rtol=1e-5)
        for zero in (att.key, att.receptance, att.output, ffn.value):
            assert not np.any(zero.kernel[...])
        np.testing.assert_allclose(singular_values(att.value.kernel[...]), 1, rtol=1e-4)
        np.testing.assert_allclose(singular_values(ffn.key.kernel[...]), 2, rtol=1e-4)
        assert (block.ln0 is None) == (layer > 0)
    np.testing.assert_allclose(singular_values(model.embedding.embedding[...]), 4e-4, rtol=1e-4)
    np.testing.assert_allclose(singular_values(model.head.kernel[...]), 0.5, rtol=1e-4)


def test_rwkv7_starts_as_the_official_code():
    config = RWKV7LanguageModelConfig(vocab_size=32, features=64, num_layers=4, head_size=16)
    model = config.build(rngs=nnx.Rngs(0))
    n = np.arange(64)
    f, lin, zz = n / 64, n / 63 - 0.5, ((n % 16) - 7.5) / 7.5
    zz *= np.abs(zz)
    for layer, block in enumerate(model.blocks):
        att, ffn = block.att, block.ffn
        rho, lam = 1 - layer / 4, layer / 3
        powers = {"r": 0.2, "g": 0.2, "w": 0.9, "a": 0.9, "k": 0.7, "v": 0.7}
        expected = {f"x_{name}": 1 - f ** (power * rho) for name, power in powers.items()}
        expected |= {
            "w0": -6 + 6 * (n / 63) ** (1 + lam**0.3) + 0.5 + 2.5 * zz,
            "a0": -0.19 + 0.3 * zz + 0.4 * lin,
            "k_k": 0.71 - 0.1 * lin,
            "k_a": np.full(64, 1.02),
            "r_k": np.full((4, 16), -0.04),
            "w1": np.zeros((64, config.decay_rank)),
        }
        for name, value in expected.items():
            np.testing.assert_allclose(getattr(att, name)[...], value, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(ffn.x_k[...], 1 - f ** (rho**4), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(att.ln_x.scale[...], ((1 + layer) / 4) ** 0.7, rtol=1e-5)
        np.testing.assert_allclose(singular_values(att.receptance.kernel[...]), 1, rtol=1e-4)
        np.testing.assert_allclose(singular_values(att.key.kernel[...]), 0.1, rtol=1e-4)
        np.testing.assert_allclose(singular_values(ffn.key.kernel[...]), 1, rtol=1e-4)
        np.testing.assert_allclose(singular_values(att.w2[...]), 0.1, rtol=1e-4)
        assert not np.any(att.output.kernel[...])
        assert not np.any(ffn.value.kernel[...])
        if layer:
            np.testing.assert_allclose(att.v0[...], 0.73 - 0.4 * lin, rtol=1e-5)
    np.testing.assert_allclose(singular_values(model.head.kernel[...]), 0.5, rtol=1e-4)
    emb = np.asarray(model.embedding.embedding[...])
    assert 0.9e-4 < np.abs(emb).max() <= 1e-4
    assert RWKV7TimeMix(64, rngs=nnx.Rngs(0)).w0[...].shape == (64,)  # no 0 / 0 with a single layer


def test_rwkv6_starts_as_the_official_code():
    config = RWKV6LanguageModelConfig(vocab_size=96, features=64, num_layers=4, head_size=16)
    model = config.build(rngs=nnx.Rngs(0))
    n = np.arange(64)
    f = n / 64
    for layer, block in enumerate(model.blocks):
        att = block.att
        rho, lam = 1 - layer / 4, layer / 3
        expected = {
            "time_maa_x": 1 - f**rho,
            "time_maa_w": 1 - f**rho,
            "time_maa_k": 1 - f**rho,
            "time_maa_v": 1 - (f**rho + 0.3 * lam),
            "time_maa_r": 1 - f ** (rho / 2),
            "time_maa_g": 1 - f ** (rho / 2),
            "time_decay": -6 + 5 * (n / 63) ** (0.7 + 1.3 * lam),
            "time_faaaa": (lam * (1 - n / 63) + 0.1 * ((n + 1) % 3 - 1)).reshape(4, 16),
            "time_maa_w1": np.zeros((64, 5 * 32)),
            "time_decay_w1": np.zeros((64, 64)),
        }
        for name, value in expected.items():
            np.testing.assert_allclose(getattr(att, name)[...], value, rtol=1e-5, atol=1e-6)
        for draw in (att.time_maa_w2[...], att.time_decay_w2[...]):
            assert 0.009 < np.abs(draw).max() <= 0.01
            assert abs(float(draw.mean())) < 1e-3
        np.testing.assert_allclose(singular_values(att.gate.kernel[...]), 0.1, rtol=1e-4)
        np.testing.assert_allclose(singular_values(block.ffn.key.kernel[...]), 1, rtol=1e-4)
    np.testing.assert_allclose(singular_values(model.head.kernel[...]), 0.5 * 1.5**0.5, rtol=1e-4)


@pytest.mark.parametrize(
    ("features", "ranks"),
    [(768, (64, 64, 32, 128)), (2048, (128, 128, 64, 224)), (64, (32, 32, 32, 32))],
)
def test_ranks_grow_with_the_width(features, ranks):
    config = RWKV7LanguageModelConfig(features=features)
    found = (config.decay_rank, config.rate_rank, config.value_rank, config.gate_rank)
    assert found == ranks
