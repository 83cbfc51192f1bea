"""A Llama of transformers and its port, a plain function: a wrong base of its rotation is named."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity_tests import compare

WIDTH, HEADS, KEY_HEADS, LAYERS, TIME = 512, 8, 4, 6, 128
HEAD_FEATURES = WIDTH // HEADS


def llama():
    """A Llama with random weights."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def rms_norm(weight, x):
    return weight * x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def logits(w, tokens, base):
    """The logits of the same Llama, whose rotary frequencies are powers of 1 / `base`."""
    frequencies = base ** -(jnp.arange(0, HEAD_FEATURES, 2) / HEAD_FEATURES)
    angles = jnp.tile(jnp.arange(TIME)[:, None] * frequencies, 2)
    mask = jnp.tril(jnp.ones((TIME, TIME), bool))
    x = w["model.embed_tokens.weight"][tokens]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)

    def rotate(x):
        a, b = jnp.split(x, 2, -1)
        return x * cos + jnp.concatenate([-b, a], -1) * sin

    for layer in (f"model.layers.{i}." for i in range(LAYERS)):

        def linear(name, x, layer=layer):
            return x @ w[f"{layer}{name}_proj.weight"].T

        # Each pair of query heads shares a key and a value.
        h = rms_norm(w[f"{layer}input_layernorm.weight"], x)
        q, k, v = (
            linear(f"self_attn.{name}", h).reshape(1, TIME, -1, HEAD_FEATURES).swapaxes(1, 2)
            for name in "qkv"
        )
        k, v = (jnp.repeat(a, HEADS // KEY_HEADS, axis=1) for a in (rotate(k), v))
        scores = rotate(q) @ k.swapaxes(2, 3) * HEAD_FEATURES**-0.5
        h = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)) @ v
        x += linear("self_attn.o", h.swapaxes(1, 2).reshape(x.shape))
        h = rms_norm(w[f"{layer}post_attention_layernorm.weight"], x)
        x += linear("mlp.down", jax.nn.silu(linear("mlp.gate", h)) * linear("mlp.up", h))
    return rms_norm(w["model.norm.weight"], x) @ w["lm_head.weight"].T


@pytest.mark.slow
def test_the_port_agrees_and_a_wrong_base_is_found_without_gradients(standard_promotion):
    twin, tokens = llama(), np.random.default_rng(0).integers(0, 256, (1, TIME))
    compared = partial(compare, twin, weights=dict, dtypes=["float64"], locate=True)
    report = compared(
        partial(logits, base=10_000.0),
        tokens,
        call_twin=lambda twin, tokens: twin(tokens).logits,
    )
    assert report.passed, f"\n{report}"
    report = compared(
        partial(logits, base=50_000.0),
        tokens,
        call_twin=lambda twin, tokens: twin(tokens).logits.detach(),
    )
    assert report.location.culprit == "model.rotary_emb", f"\n{report}"
