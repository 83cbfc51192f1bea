"""Compares `Attention` with the attention layers of transformers' hybrid models."""

from importlib import import_module
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx

from jax_models import Attention, from_torch, to_torch
from jax_models.weights import nested
from parity_tests import assert_parity
from parity_tests.engine.problem import in_every_dtype

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("peers")]

TIME = 9
SIZES = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"attn_implementation": "eager"}
THETA = {"rope_type": "default", "rope_theta": 100.0}
OLMO = {"qk_norm": "all", "use_bias": True, "out_bias": True, "epsilon": 1e-3}
LAYERS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "Qwen3.5": (
        "qwen3_5",
        "Qwen3_5Text",
        {"head_dim": 12, "rope_parameters": THETA | {"partial_rotary_factor": 0.25}},
        {
            "head_features": 12,
            "rotary_features": 3,
            "qk_norm": "head",
            "zero_centered_norm": True,
            "output_gate": True,
        },
    ),
    "OLMo Hybrid": (
        "olmo_hybrid",
        "OlmoHybrid",
        {"attention_bias": True, "rms_norm_eps": 1e-3, "rope_parameters": THETA},
        OLMO,
    ),
    "OLMo Hybrid without positions": (
        "olmo_hybrid",
        "OlmoHybrid",
        {"attention_bias": True, "rms_norm_eps": 1e-3, "rope_parameters": None},
        OLMO | {"rotary_features": 0},
    ),
    "LFM2": (
        "lfm2",
        "Lfm2",
        {"rope_parameters": THETA, "norm_eps": 1e-3},
        {"qk_norm": "head", "epsilon": 1e-3},
    ),
}


class Peer(torch.nn.Module):
    """A layer of transformers with the positions and the mask that its model would pass to it."""

    def __init__(self, layer: torch.nn.Module, rotary: torch.nn.Module | None):
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1])[None]
        turns = None if self.rotary is None else self.rotary(x, positions)
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf, dtype=x.dtype).triu(1)
        return self.layer(x, turns, mask[None, None])[0]


@pytest.mark.parametrize("name", LAYERS)
def test_attention_is_that_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    layout, prefix, theirs, ours = LAYERS[name]
    module = import_module(f"transformers.models.{layout}.modeling_{layout}")
    config = getattr(transformers, f"{prefix}Config")(**SIZES | theirs)
    rotary, theta = None, {}
    if ours.get("rotary_features") != 0:
        rotary = getattr(module, f"{prefix}RotaryEmbedding")(config)
        theta = {"rope_theta": 100.0}
    layer = getattr(module, f"{prefix.removesuffix('Text')}Attention")(config, 0).double().eval()
    rng = np.random.default_rng(0)
    for parameter in layer.parameters():
        draw = 0.5 * rng.standard_normal(parameter.shape)
        parameter.data = torch.from_numpy(in_every_dtype(draw))
    peer = Peer(layer, rotary)
    x = in_every_dtype(rng.standard_normal((2, TIME, 24)))
    for dtype in ("float64", "float32"):
        weights = {k: w.numpy().astype(dtype) for k, w in layer.state_dict().items()}
        options = ours | theta | {"num_kv_heads": 2, "param_dtype": dtype}
        with jax.enable_x64(True):
            port = from_torch(Attention(24, 4, **options, rngs=nnx.Rngs(0)), weights)
            jax.tree.map(np.testing.assert_array_equal, to_torch(port, layout), weights)
        table = nested(port.torch_layouts()[layout], "", "layer")
        assert_parity(peer, port, x, weights=table, call=lambda port, x: port(x)[0], dtypes=[dtype])
