"""What an importing project relies on."""

import os
import subprocess
import sys

import numpy as np
from safetensors.numpy import load_file, save_file

BLOCKED = """
import sys
for name in ("torch", "tyro", "grain", "matplotlib", "safetensors"):
    sys.modules[name] = None
"""


def run(code: str) -> str:
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    )
    return done.stdout


def test_layers_need_no_torch():
    code = """
import jax.numpy as jnp
from flax import nnx
from jax_models import LSTM, from_torch, to_torch
layer = LSTM(3, 4, rngs=nnx.Rngs(0))
from_torch(layer, to_torch(layer))
print(layer(jnp.ones((1, 2, 3)))[0].shape)
"""
    assert run(BLOCKED + code) == "(1, 2, 4)\n"


def test_import_is_quick():
    code = """
import time, jax, flax.nnx
start = time.perf_counter()
import jax_models
print(time.perf_counter() - start)
"""
    assert float(run(code)) < 2


def test_exported_arrays_survive_safetensors(tmp_path):
    """Version 0.8.0 scrambles arrays that are not C-contiguous."""
    from flax import nnx

    from jax_models import LSTM, to_torch

    weights = to_torch(LSTM(3, 4, rngs=nnx.Rngs(0)))
    save_file(weights, tmp_path / "weights.safetensors")
    for name, array in load_file(tmp_path / "weights.safetensors").items():
        np.testing.assert_array_equal(array, weights[name])
