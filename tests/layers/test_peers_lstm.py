"""The LSTMs inside models that nobody of this project wrote: labml's and Resemblyzer's."""

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_models import LSTM, from_torch, to_torch
from jax_models.weights import linear, nested
from parity_tests import assert_parity

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("peers")]


def module_of(package: str, name: str, replaced: str, **members: Any) -> Any:
    """One file of a package; another that it imports is replaced, whose own imports are many."""
    found = find_spec(package)
    if found is None:
        pytest.skip(f"{package} is not installed")
    whole, other = ModuleType(package), ModuleType(f"{package}.{replaced}")
    whole.__path__ = found.submodule_search_locations or []
    whole.__dict__[replaced] = other
    other.__dict__.update(members)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, whole.__name__, whole)
        patch.setitem(sys.modules, other.__name__, other)
        return importlib.import_module(f"{package}.{name}")


def tensors(weights: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(array) for key, array in weights.items()}


@pytest.mark.parametrize("num_layers", [1, 3])
def test_the_lstm_of_labml(num_layers):
    theirs = pytest.importorskip("labml_nn.lstm").LSTM(5, 6, num_layers)
    x, h, c = (
        np.random.default_rng(seed).standard_normal((size, 4, features))
        for seed, (size, features) in enumerate([(9, 5), (num_layers, 6), (num_layers, 6)])
    )
    ours = LSTM(
        5, 6, num_layers=num_layers, recurrent_bias=False, time_major=True, rngs=nnx.Rngs(0)
    )
    assert_parity(
        theirs,
        ours,
        x,
        (h, c),
        weights="labml",
        call=lambda layer, x, state: layer(x, type(layer.init_state(1))(*state)),
    )
    for recurrent_bias in (False, True):
        ours = LSTM(
            5,
            6,
            num_layers=num_layers,
            recurrent_bias=recurrent_bias,
            rngs=nnx.Rngs(recurrent_bias),
        )
        weights = to_torch(from_torch(ours, theirs.state_dict()), "labml")
        theirs.load_state_dict(tensors(weights))


class VoiceEncoder(nnx.Module):
    """Resemblyzer's network: the last layer's last h, projected, rectified and of norm 1."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.lstm = LSTM(40, 256, num_layers=3, rngs=rngs)
        self.linear = nnx.Linear(256, 256, rngs=rngs)

    def __call__(self, mels: jax.Array) -> jax.Array:
        _, state = self.lstm(mels)
        embedding = jax.nn.relu(self.linear(state.h[-1]))
        return embedding / jnp.linalg.norm(embedding, axis=1, keepdims=True)


def test_resemblyzer_with_its_published_weights():
    """Spectra are powers of a voice's mel bands, so never negative, and mostly near zero."""
    theirs = module_of("resemblyzer", "voice_encoder", "audio").VoiceEncoder("cpu", verbose=False)
    mels = np.random.default_rng(0).exponential(0.01, (2, 60, 40))
    ours = VoiceEncoder(rngs=nnx.Rngs(0))
    table = [*nested(ours.lstm.torch_layouts()["torch.nn"], "lstm", "lstm")]
    assert_parity(theirs, ours, mels, weights=[*table, *linear("linear", "linear")])
