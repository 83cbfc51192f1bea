"""Compares Gated DeltaNet with transformers' Qwen3-Next, whose projections are in another order.

`tests/models/test_peers_hybrids.py` compares the layers of the other hybrids, inside their models.
"""

import jax
import numpy as np
import pytest
import torch
from flax import nnx

from jax_models import GatedDeltaNet, from_torch, to_torch
from parity_tests import assert_parity
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


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_outputs_and_gradients_are_those_of_transformers(dtype):
    """75 steps are longer than a chunk."""
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    config = transformers.Qwen3NextConfig(**OPTIONS)
    peer = module.Qwen3NextGatedDeltaNet(config, layer_idx=0).double().eval()
    rng = np.random.default_rng(1)
    for parameter in peer.parameters():
        scale = 0.5 if parameter.ndim == 1 else parameter[0].numel() ** -0.5
        draw = scale * rng.standard_normal(tuple(parameter.shape))
        parameter.data = torch.from_numpy(in_every_dtype(draw))
    weights = {key: w.to(getattr(torch, dtype)) for key, w in peer.state_dict().items()}
    with jax.enable_x64(True):
        layer = GatedDeltaNet(12, **SIZES, epsilon=1e-3, param_dtype=dtype, rngs=nnx.Rngs(0))
        layer = from_torch(layer, weights)
    jax.tree.map(np.testing.assert_array_equal, to_torch(layer, "qwen3_next"), weights)
    x, call = rng.standard_normal((2, 75, 12)), lambda layer, x: layer(x)[0]
    assert_parity(peer, layer, x, weights="qwen3_next", call=call, dtypes=[dtype])
