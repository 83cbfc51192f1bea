"""An architecture of another package, in four files, is found everywhere that ours are."""

import pytest

LAYER = '''
import jax.numpy as jnp
from flax import nnx
from jax_models import GRU, Constant, LayerNorm, SequenceLayer
from jax_models.weights import layer_norm, linear, nested, same


class PlainBlock(SequenceLayer):
    """x + leak · (GRU(norm(x)) W + b), where leak is a fixed number."""

    def __init__(
        self, features: int, units: int, leak: float, *, dtype=None, param_dtype="float32", rngs
    ):
        super().__init__(features, dtype=dtype, param_dtype=param_dtype)
        options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.norm = LayerNorm(features, **options)
        self.gru = GRU(features, units, **options)
        self.out = nnx.Linear(units, features, **options)
        self.leak = Constant(jnp.asarray(leak, param_dtype))

    def init_state(self, batch_size):
        return self.gru.init_state(batch_size)

    def sequence(self, x, state, *masks):
        y, state = self.gru.sequence(self.norm(x), state, *masks)
        return x + self.leak[...].astype(y.dtype) * self.out(y), state

    def torch_layouts(self):
        gru = self.gru.torch_layouts()["torch.nn"]
        return {
            "plain": [
                *layer_norm("norm", "norm"),
                *nested(gru, "gru", "gru"),
                *linear("out", "out"),
                same("leak", "leak"),
            ]
        }
'''
MODEL = """
import dataclasses
from typing import ClassVar

from flax import nnx

from jax_models import LanguageModel, RMSNorm
from jax_models.models.architecture import Layout
from jax_models.models.configs import StackConfig
from plain.layer import PlainBlock


@dataclasses.dataclass(frozen=True)
class PlainLanguageModelConfig(StackConfig):
    family: ClassVar = "Plain"
    marks: ClassVar = (".gru.weight_ih_l0",)
    twin: ClassVar = "plain.twin"
    layouts: ClassVar = {
        "plain": Layout(  # the names of Hawk's
            "embedding.weight",
            "blocks",
            "final_norm.weight",
            sizes=lambda checkpoint: {
                "units": checkpoint.size("*.gru.bias_hh_l0", 0) // 3,
                "leak": checkpoint.value("*.leak"),
            },
        ),
        "plain-shifted": Layout(
            "model.embedding.weight",
            "model.blocks",
            "model.final_norm.weight",
            blocks_layout="plain",
            sizes=lambda checkpoint: {
                "units": checkpoint.size("*.out.weight", 1),
                "leak": checkpoint.value("*.leak"),
            },
        ),
    }

    presets: ClassVar = {"plain": {"model.features": 8, "num_steps": 4, "window": 12}}

    vocab_size: int = 11
    features: int = 6
    num_layers: int = 2
    units: int = 5
    leak: float = 0.5

    def build(self, **options):
        return PlainLanguageModel(self, **options)


class PlainLanguageModel(LanguageModel):
    def __init__(self, config: PlainLanguageModelConfig, **options):
        super().__init__(
            config,
            embedding=nnx.Embed(config.vocab_size, config.features, **options),
            blocks=[config.make(PlainBlock, **options) for _ in range(config.num_layers)],
            norm=RMSNorm(config.features, **options),
        )
"""
TWIN = """
import torch
from torch import nn


class PlainBlock(nn.Module):
    def __init__(self, features, units, leak):
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.gru = nn.GRU(features, units, batch_first=True)
        self.out = nn.Linear(units, features)
        self.register_buffer("leak", torch.tensor(leak))

    def forward(self, x, state=None):
        h = None if state is None else state[0]
        y, h = self.gru(self.norm(x), h)
        return x + self.leak * self.out(y), (h,)


class PlainLanguageModel(nn.Module):
    def __init__(self, vocab_size, features, num_layers, units, leak):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, features)
        self.blocks = nn.ModuleList(PlainBlock(features, units, leak) for _ in range(num_layers))
        self.final_norm = nn.RMSNorm(features, eps=1e-6)

    @classmethod
    def from_config(cls, config):
        sizes = config.vocab_size, config.features, config.num_layers
        return cls(*sizes, config.units, config.leak)

    def forward(self, tokens, state=None):
        x = self.embedding(tokens)
        for block in self.blocks:
            x, _ = block(x)
        return self.final_norm(x) @ self.embedding.weight.T, ()
"""
REGISTRY = """
from functools import partial

from parity_tests.registry.case import Case
from plain import twin
from plain.layer import PlainBlock
from plain.model import PlainLanguageModelConfig

config = PlainLanguageModelConfig()
plain = partial(Case, layout="plain", architecture="plain")
CASES = [
    plain("PlainBlock", partial(twin.PlainBlock, 6, 5, 0.5), partial(PlainBlock, 6, 5, 0.5)),
    plain(
        "PlainLanguageModel",
        partial(twin.PlainLanguageModel.from_config, config),
        config.build,
        twin_state=False,
    ),
]
"""
ENTRY_POINTS = """
[twinscan.models]
plain = plain.model

[twinscan.registry]
plain = plain.registry
"""
CONVERT = """
import numpy as np
from flax import nnx
from safetensors.numpy import save_file
from benchmarks.bound import cases_by_architecture
from train.command import convert
from jax_models import load_pretrained, to_torch
from plain.model import PlainLanguageModelConfig

assert cases_by_architecture()["plain"] == ["PlainBlock", "PlainLanguageModel"]
config = PlainLanguageModelConfig(features=4, num_layers=3, units=7, leak=0.25)
model = config.build(rngs=nnx.Rngs(0))
save_file(to_torch(model), "plain.safetensors")
assert load_pretrained("plain.safetensors").config == model.config
convert.main("--from plain.safetensors --to b.safetensors --layout plain-shifted".split())
converted = load_pretrained("b.safetensors")
assert converted.config == model.config
for key, array in to_torch(model).items():
    np.testing.assert_array_equal(to_torch(converted)[key], array)
"""
MESH = ["--mesh.data", "2", "--mesh.fully-sharded"]


@pytest.fixture
def run(installed):
    """Runs Python with the package installed in a temporary folder."""
    files = {"layer": LAYER, "model": MODEL, "twin": TWIN, "registry": REGISTRY}
    return installed("plain", files, ENTRY_POINTS)


@pytest.mark.slow
def test_its_checkpoints_are_read_and_converted(run):
    run("-c", CONVERT)


@pytest.mark.slow
def test_it_is_trained_on_a_mesh_and_compared_with_the_twin(run):
    train = ["-m", "train", "--preset", "plain", "--text", "text", "--out", "run"]
    shown = run(*train, "--optimizer.warmup-steps", "0", "--eval-batches", "1", *MESH)
    assert "errors of the float32 logits against the float64 twin" in shown
    assert run("-m", "train.command.generate", "--run", "run", "--prompt", "To be").startswith(
        "To be"
    )
