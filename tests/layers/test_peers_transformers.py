"""Compares layers with those of transformers.

Gated DeltaNet is that of Qwen3-Next, Kimi Delta Attention is also that of Ling 3, Mamba is also
that of FalconMamba and Jamba, attention is that of StarCoder2 and Qwen3, latent attention is that
of Kimi Linear and Ling 3, and the mLSTM is that of xLSTM. The projections of Qwen3-Next are in
another order. `tests/models/test_peers_hybrids.py` compares Mamba-2 and the layers of the hybrids,
inside their models.
"""

from importlib import import_module
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx

from jax_models import (
    MLSTM,
    Attention,
    GatedDeltaNet,
    KimiDeltaAttention,
    LatentAttention,
    Mamba,
    from_torch,
    to_torch,
)
from parity_tests import assert_parity
from parity_tests.engine.bounds.torch_rounding import InFloat64
from parity_tests.engine.problem import in_every_dtype

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("peers")]

OPTIONS = {
    "hidden_size": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 3,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "rms_norm_eps": 1e-3,
}
SIZES = {"num_key_heads": 2, "num_value_heads": 6, "key_features": 5, "value_features": 3}
MAMBA = {"state_size": 5, "time_step_rank": 3, "conv_kernel": 3}
SELECTIVE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("MambaMixer", {"model_type": "mamba", **MAMBA}, {}),
    (
        "FalconMambaMixer",
        {"model_type": "falcon_mamba", **MAMBA, "mixer_rms_eps": 1e-3, "use_conv_bias": False},
        {"norm": "plain", "epsilon": 1e-3, "conv_bias": False},
    ),
    (
        "JambaMambaMixer",
        {
            "model_type": "jamba",
            "mamba_d_state": 5,
            "mamba_dt_rank": 3,
            "mamba_d_conv": 3,
            "mamba_proj_bias": True,
            "rms_norm_eps": 1e-3,
        },
        {"norm": "scaled", "epsilon": 1e-3, "use_bias": True},
    ),
]
ATTENTION = {
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
    "attn_implementation": "eager",
}
ATTENTIONS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("Starcoder2", {"sliding_window": None, "use_bias": False}, {}),
    (
        "Starcoder2",
        {"sliding_window": 5, "use_bias": True},
        {"window": 5, "use_bias": True, "out_bias": True},
    ),
    (
        "Qwen3",
        {
            "head_dim": 10,
            "rms_norm_eps": 1e-3,
            "sliding_window": 3,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention"],
            "num_hidden_layers": 1,
        },
        {"head_features": 10, "qk_norm": "head", "epsilon": 1e-3, "window": 3},
    ),
]

LATENT = {
    "hidden_size": 24,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 7,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "rms_norm_eps": 1e-3,  # the norms of latents keep 1e-6
    "attn_implementation": "eager",
}
LATENTS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("kimi_linear", "KimiLinear", {}, {}),
    (
        "kimi_linear",
        "KimiLinear",
        {"q_lora_rank": 8, "attention_bias": True},
        {"query_features": 8, "use_bias": True},
    ),
    (
        "bailing_hybrid",
        "BailingHybrid",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        {"rope_theta": 50.0, "output_gate": True},
    ),
]


def randomise(module: torch.nn.Module) -> np.random.Generator:
    """Draws all parameters, and returns the generator."""
    rng = np.random.default_rng(1)
    for parameter in module.parameters():
        scale = 0.5 if parameter.ndim == 1 else parameter[0].numel() ** -0.5
        draw = scale * rng.standard_normal(tuple(parameter.shape))
        parameter.data = torch.from_numpy(in_every_dtype(draw))
    return rng


def test_gated_delta_net_is_that_of_qwen3_next():
    """75 steps are longer than a chunk."""
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    config = transformers.Qwen3NextConfig(**OPTIONS)
    peer = module.Qwen3NextGatedDeltaNet(config, layer_idx=0)
    layer = assert_is_mixer(peer, GatedDeltaNet, "qwen3_next", **SIZES, epsilon=1e-3)
    weights = to_torch(from_torch(layer, peer.state_dict()), "qwen3_next")
    jax.tree.map(np.testing.assert_array_equal, weights, dict(peer.state_dict()))


@pytest.mark.parametrize(
    ("name", "family", "fields", "options"),
    [
        ("kimi_linear", "KimiLinear", {}, {}),
        ("bailing_hybrid", "BailingHybrid", {}, {"low_rank": False, "min_log_decay": -5.0}),
        ("bailing_hybrid", "BailingHybrid", {"kda_safe_gate": False}, {"low_rank": False}),
    ],
)
def test_kimi_delta_attention_is_that_of_transformers(name, family, fields, options):
    """75 steps are longer than a chunk. Ling 3 is called Bailing there."""
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    config = getattr(transformers, f"{family}Config")(
        hidden_size=12,
        linear_num_heads=3,
        linear_head_dim=4,
        linear_conv_kernel_dim=3,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        rms_norm_eps=1e-3,
        **fields,
    )
    with InFloat64():
        peer = getattr(module, f"{family}DeltaAttention")(config, layer_idx=0)
    sizes = {"num_heads": 3, "head_features": 4, "kernel_size": 3, "epsilon": 1e-3}
    layer = assert_is_mixer(peer, KimiDeltaAttention, name, **sizes, **options)
    weights = to_torch(from_torch(layer, peer.state_dict()), name)
    jax.tree.map(np.testing.assert_array_equal, weights, dict(peer.state_dict()))


@pytest.mark.parametrize(("mixer", "config", "options"), SELECTIVE)
def test_mamba_is_that_of_transformers(mixer, config, options):
    """FalconMamba has norms without weights, and Jamba has norms with weights."""
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip(f"transformers.models.{config['model_type']}")
    config = transformers.AutoConfig.for_model(hidden_size=12, **config)
    mixer = getattr(import_module(f"{module.__name__}.modeling_{config.model_type}"), mixer)
    # FalconMamba's mixer cannot initialize its weights alone.
    alone = {} if config.model_type == "jamba" else {"initialize_mixer_weights": False}
    sizes = {"state_features": 5, "dt_rank": 3, "kernel_size": 3}
    assert_is_mixer(mixer(config, layer_idx=0, **alone), Mamba, "mamba", **sizes, **options)


@pytest.mark.parametrize("mode", ["single", "fused"])
def test_mlstm_is_that_of_transformers(mode):
    """Of the 75 steps, transformers runs 64 by chunks, and the others one after the other."""
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip("transformers.models.xlstm.modeling_xlstm")
    options = {"gate_soft_cap": 5.0, "eps": 0.1, "norm_eps": 1e-3, "chunk_size": 16}
    config = transformers.xLSTMConfig(hidden_size=12, num_heads=3, weight_mode=mode, **options)
    ours = {"num_heads": 3, "gate_soft_cap": 5.0, "normalizer_epsilon": 0.1, "epsilon": 1e-3}
    layout = {"single": "xlstm", "fused": "xlstm-fused"}[mode]
    peer = module.xLSTMLayer(config)
    assert_is_mixer(peer, MLSTM, layout, **ours, call_twin=lambda peer, x: peer(x)[0])


def assert_is_mixer(
    peer: torch.nn.Module, kind: Any, weights: str, call_twin: Any = None, **options: Any
) -> Any:
    """Asserts that a layer computes what a mixer of transformers does, and returns the layer."""
    peer = peer.double().eval()
    rng = randomise(peer)
    with jax.enable_x64(True):
        layer = kind(12, **options, param_dtype=np.float64, rngs=nnx.Rngs(0))
    x, call = rng.standard_normal((2, 75, 12)), lambda layer, x: layer(x)[0]
    calls: Any = {"call": call, "call_twin": call_twin}
    assert_parity(peer, layer, x, weights=weights, **calls, dtypes=["float64"])
    return layer


@pytest.mark.parametrize(("family", "config", "options"), ATTENTIONS)
def test_attention_is_that_of_transformers(family, config, options):
    """With the angles and the mask that the whole model would pass to its attention."""
    transformers = pytest.importorskip("transformers")
    masks = import_module("transformers.masking_utils")
    name = family.lower()
    module = import_module(f"transformers.models.{name}.modeling_{name}")
    config = getattr(transformers, f"{family}Config")(**ATTENTION | config)
    with InFloat64():
        angles = getattr(module, f"{family}RotaryEmbedding")(config).double()
        peer = getattr(module, f"{family}Attention")(config, layer_idx=0).double().eval()
    rng = randomise(peer)
    window = config.sliding_window is not None
    mask = masks.create_sliding_window_causal_mask if window else masks.create_causal_mask

    def call_twin(peer, x):
        steps = torch.arange(x.shape[1])[None]
        seen = mask(config, x, attention_mask=None, cache=None, position_ids=steps)
        return peer(x, angles(x, steps), attention_mask=seen)[0]

    with jax.enable_x64(True):
        options = {"num_kv_heads": 2, "rope_theta": 50.0, "param_dtype": np.float64} | options
        layer = Attention(24, 4, **options, rngs=nnx.Rngs(0))
    assert_parity(
        peer,
        layer,
        rng.standard_normal((2, 17, 24)),
        weights="qwen3_5",
        call=lambda layer, x: layer(x)[0],
        call_twin=call_twin,
        dtypes=["float64"],
    )


@pytest.mark.parametrize(("name", "family", "config", "options"), LATENTS)
def test_latent_attention_is_that_of_transformers(name, family, config, options):
    """Ling 3, which is called Bailing there, rotates a part of the queries and keys."""
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    config = getattr(transformers, f"{family}Config")(**LATENT | config)
    rotates = "rope_theta" in options
    with InFloat64():
        angles = module.BailingHybridRotaryEmbedding(config).double() if rotates else None
        peer = getattr(module, f"{family}Attention")(config, layer_idx=0).double().eval()
    rng = randomise(peer)

    def call_twin(peer, x):
        steps = torch.arange(x.shape[1])
        mask = torch.where(steps <= steps[:, None], 0.0, -torch.inf).double()[None, None]
        placed = {} if angles is None else {"position_embeddings": angles(x, steps[None])}
        return peer(x, attention_mask=mask, **placed)[0]

    with jax.enable_x64(True):
        sizes = {"latent_features": 7, "key_features": 5, "shared_features": 4, "value_features": 6}
        layer = LatentAttention(24, 3, **sizes, **options, param_dtype=np.float64, rngs=nnx.Rngs(0))
    assert_parity(
        peer,
        layer,
        rng.standard_normal((2, 17, 24)),
        weights="deepseek",
        call=lambda layer, x: layer(x)[0],
        call_twin=call_twin,
        dtypes=["float64"],
    )
