"""A new hybrid of layers that exist, under keys of its own, takes three files and nothing else."""

import pytest

MODEL = '''
import dataclasses
from typing import ClassVar

from jax_models import Attention, ShortConvolution
from jax_models.models.architecture import Size, tied_head
from jax_models.models.hf import kinds_by_key
from jax_models.models.hybrid import (
    FULL,
    BlockKeys,
    HybridConfig,
    HybridLanguageModel,
    heads_of,
    model_layouts,
    rows,
)
from jax_models.weights import layouts_of, linear, nested

PROJECTIONS = ("gate", "up", "down")
KEYS = ("norm1", "norm2", "mixed", "ffn", PROJECTIONS)
SIZES = {
    "mlp_features": Size("*.ffn.gate.weight", 0),
    "block_types": kinds_by_key("*.conv.taps.weight", "conv", FULL),
    "head_features": rows("attention.query_norm.weight", rank=1),
    "num_heads": rows("attention.query.weight", heads_of()),
    "num_kv_heads": rows("attention.key.weight", heads_of()),
    "tied_head": tied_head,
}
STATE_DICT, FILE = model_layouts("mixed", "last_norm", SIZES, blocks_layout="mixed")


@layouts_of(ShortConvolution)
def conv_layouts(layer):
    names = {"in_gate_proj": "in_gate", "out_gate_proj": "out_gate", "value_proj": "value"}
    names |= {"out_proj": "out"}
    rows = [row for name, key in names.items() for row in linear(name, key, bias=False)]
    return {"mixed": [*rows, *nested(layer.conv.torch_rows(), "conv", "taps")]}


@layouts_of(Attention)
def attention_layouts(layer):
    return {"mixed": layer.rows("query", "key", "value", "out", "query_norm", "key_norm")}


@dataclasses.dataclass(frozen=True)
class MixedLanguageModelConfig(HybridConfig):
    family: ClassVar = "Mixed"
    marks: ClassVar = (".conv.taps.",)
    twin: ClassVar = "mixed.twin"
    kinds: ClassVar = ("conv", FULL)
    block_keys: ClassVar = {
        "mixed": {"conv": BlockKeys("conv", *KEYS), FULL: BlockKeys("attention", *KEYS)}
    }
    layouts: ClassVar = {"mixed": STATE_DICT, "mixed-file": FILE}
    presets: ClassVar = {"mixed": {"num_steps": 4, "window": 12}}

    vocab_size: int = 11
    features: int = 8
    num_layers: int = 2
    mlp_features: int = 6
    block_types: tuple[str, ...] = ("conv", FULL)
    num_heads: int = 2
    num_kv_heads: int = 1
    head_features: int | None = 4
    rope_theta: float | None = None
    max_length: int | None = 40

    def build(self, **options):
        return MixedLanguageModel(self, **options)

    def attention(self, **options):
        return super().attention(qk_norm="head", rotary_features=0, **options)

    def mixer(self, **options):
        return self.make(ShortConvolution, **options)


class MixedLanguageModel(HybridLanguageModel):
    """Token embedding, blocks with a short convolution or attention, RMSNorm, and the head."""
'''
TWIN = """
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

Linear = partial(nn.Linear, bias=False)
Norm = partial(nn.RMSNorm, eps=1e-6)


class ShortConvolution(nn.Module):
    def __init__(self, features):
        super().__init__()
        for name in ("in_gate", "out_gate", "value", "out"):
            setattr(self, name, Linear(features, features))
        self.taps = nn.Conv1d(features, features, 3, padding=2, groups=features, bias=False)

    def forward(self, x):
        u = self.taps((self.in_gate(x) * self.value(x)).mT)[..., : x.shape[1]].mT
        return self.out(self.out_gate(x) * u)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, size = (config.num_heads, config.num_kv_heads), config.head_features
        self.query = Linear(config.features, config.num_heads * size)
        self.key = Linear(config.features, config.num_kv_heads * size)
        self.value = Linear(config.features, config.num_kv_heads * size)
        self.out = Linear(config.num_heads * size, config.features)
        self.query_norm, self.key_norm = Norm(size), Norm(size)

    def forward(self, x):
        num_heads, num_kv_heads = self.heads
        q = self.query_norm(self.query(x).unflatten(-1, (num_heads, -1)))
        k = self.key_norm(self.key(x).unflatten(-1, (num_kv_heads, -1)))
        v = self.value(x).unflatten(-1, (num_kv_heads, -1))
        k, v = (a.repeat_interleave(num_heads // num_kv_heads, dim=2) for a in (k, v))
        y = F.scaled_dot_product_attention(*(a.transpose(1, 2) for a in (q, k, v)), is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, features, mlp_features):
        super().__init__()
        self.gate, self.up = Linear(features, mlp_features), Linear(features, mlp_features)
        self.down = Linear(mlp_features, features)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config, kind):
        super().__init__()
        self.mixer = "conv" if kind == "conv" else "attention"
        self.norm1, self.norm2 = Norm(config.features), Norm(config.features)
        mixer = ShortConvolution(config.features) if kind == "conv" else Attention(config)
        self.add_module(self.mixer, mixer)
        self.ffn = MLP(config.features, config.mlp_features)

    def forward(self, x):
        x = x + self.get_submodule(self.mixer)(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class Mixed(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.features)
        self.layers = nn.ModuleList(Block(config, kind) for kind in config.mixings)
        self.last_norm = Norm(config.features)


class MixedLanguageModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.mixed = Mixed(config)
        self.lm_head = Linear(config.features, config.vocab_size)
        self.lm_head.weight = self.mixed.embed_tokens.weight

    @classmethod
    def from_config(cls, config):
        return cls(config)

    def forward(self, tokens, state=None):
        x = self.mixed.embed_tokens(tokens)
        for block in self.mixed.layers:
            x = block(x)
        return self.lm_head(self.mixed.last_norm(x)), ()
"""
REGISTRY = """
from functools import partial

from parity_tests.registry.case import Case
from parity_tests.registry.mutation import Mutation, edited, exchanged
from mixed import twin
from mixed.model import MixedLanguageModelConfig

config = MixedLanguageModelConfig()
CASES = [
    Case(
        "MixedLanguageModel",
        partial(twin.MixedLanguageModel.from_config, config),
        config.build,
        layout="mixed",
        architecture="mixed",
        twin_state=False,
    ),
]
MUTATIONS = [
    Mutation(
        "gate and up exchanged",
        "MixedLanguageModel",
        "weights",
        edited(exchanged("blocks.0.mlp", "gate_proj", "up_proj")),
        culprit="mixed.layers.0.ffn",
    ),
]
"""
ENTRY_POINTS = """
[twinscan.models]
mixed = mixed.model

[twinscan.registry]
mixed = mixed.registry
"""
FOUND = """
import dataclasses
import numpy as np
from flax import nnx
from safetensors.numpy import save_file
import benchmarks.bound
from train.command import convert
from benchmarks.families.training_loop import config_of
from jax_models import GatedMLP, LFM2LanguageModelConfig, from_weights, load_pretrained, to_torch
from jax_models.models.architecture import architectures
from mixed.model import MixedLanguageModelConfig

config = MixedLanguageModelConfig(num_layers=3, mlp_features=5, max_length=None)
model = config.build(rngs=nnx.Rngs(0))
weights = to_torch(model)
assert "mixed.layers.1.attention.query_norm.weight" in weights

assert MixedLanguageModelConfig in architectures()
assert isinstance(config_of("mixed", 1).model, MixedLanguageModelConfig)
assert benchmarks.bound.cases_by_architecture()["mixed"] == ["MixedLanguageModel"]

save_file(weights, "mixed.safetensors")
for read in (load_pretrained("mixed.safetensors"), from_weights(weights)):
    assert dataclasses.replace(read.config, max_length=None) == config, read.config
convert.main("--from mixed.safetensors --to b.safetensors --layout mixed-file".split())
converted = to_torch(load_pretrained("b.safetensors"))
for key, array in weights.items():
    np.testing.assert_array_equal(converted[key], array)

# The layers have the keys of all architectures, each in a layout of its own.
lfm2 = LFM2LanguageModelConfig(features=8, num_layers=3).build(rngs=nnx.Rngs(0))
assert {"lfm2", "mixed"} <= lfm2.blocks[0].mixer.torch_layouts().keys()
assert [*lfm2.torch_layouts()] == ["hf", "hf-file"]
assert "model.layers.0.feed_forward.w1.weight" in to_torch(lfm2)
"""
MESH = ["--mesh.data", "2", "--mesh.fully-sharded"]


@pytest.fixture
def run(installed):
    """Runs Python with a package of the three files installed in a temporary folder."""
    files = {"model": MODEL, "twin": TWIN, "registry": REGISTRY}
    return installed("mixed", files, ENTRY_POINTS)


@pytest.mark.slow
def test_its_weights_are_read_and_converted_and_the_benchmarks_find_it(run):
    run("-c", FOUND)


@pytest.mark.slow
def test_it_is_in_the_report(run):
    shown = run("-m", "parity_tests", "--platform", "cpu", "--case", "Mixed", "--mutations")
    assert "MixedLanguageModel" in shown
    assert "planted faults: 1 of 1 caught" in shown


@pytest.mark.slow
def test_it_is_trained_on_a_mesh_and_compared_with_the_twin(run):
    train = ["-m", "train", "--preset", "mixed", "--text", "text", "--out", "run"]
    shown = run(*train, "--optimizer.warmup-steps", "0", "--eval-batches", "1", *MESH)
    assert "errors of the float32 logits against the float64 twin" in shown
    assert run("-m", "train.command.generate", "--run", "run", "--prompt", "To be").startswith(
        "To be"
    )
