"""A new hybrid of layers that exist, under keys of its own, takes its file and nothing else.

`tests/registry/test_other_packages.py` compares a model of another package with its twin, and
trains it.
"""

import pytest

MODEL = '''
import dataclasses
from typing import ClassVar

from jax_models import Attention, ShortConvolution
from jax_models.models.hf import kinds_by_key
from jax_models.models.hybrid import (
    FULL,
    BlockKeys,
    HybridConfig,
    HybridLanguageModel,
    model_layouts,
)
from jax_models.weights import layouts_of, linear, nested

PROJECTIONS = ("gate", "up", "down")
KEYS = ("norm1", "norm2", "mixed", "ffn", PROJECTIONS)


def sizes(checkpoint):
    head_features = checkpoint.size("*.attention.query_norm.weight", 0)
    return {
        "mlp_features": checkpoint.size("*.ffn.gate.weight", 0),
        "block_types": kinds_by_key(checkpoint, "*.conv.taps.weight", "conv", FULL),
        "head_features": head_features,
        "num_heads": checkpoint.size("*.attention.query.weight", 0) // head_features,
        "num_kv_heads": checkpoint.size("*.attention.key.weight", 0) // head_features,
        "tied_head": checkpoint.tied_head,
    }


STATE_DICT, FILE = model_layouts("mixed", "last_norm", sizes, blocks_layout="mixed")


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
    epsilon: float = 1e-5
    rope_theta: float | None = 1e6
    max_length: int | None = 40

    def build(self, **options):
        return MixedLanguageModel(self, **options)

    def attention(self, **options):
        return super().attention(qk_norm="head", **options)

    def mixer(self, **options):
        return self.make(ShortConvolution, **options)


class MixedLanguageModel(HybridLanguageModel):
    """Token embedding, blocks with a short convolution or attention, RMSNorm, and the head."""
'''
FOUND = """
import dataclasses
from operator import attrgetter
import numpy as np
from flax import nnx
from safetensors.numpy import save_file
from train.command import convert
from benchmarks.families.training_loop import config_of
from jax_models import LFM2LanguageModelConfig, from_weights, load_pretrained, to_torch
from jax_models.models.architecture import architectures
from mixed.model import MixedLanguageModelConfig

config = MixedLanguageModelConfig(num_layers=3, mlp_features=5, max_length=None)
model = config.build(rngs=nnx.Rngs(0))
weights = to_torch(model)
for key, path in {
    "0.conv.in_gate": "mixer.in_gate_proj",
    "0.conv.value": "mixer.value_proj",
    "0.ffn.gate": "mlp.gate_proj",
    "1.ffn.up": "mlp.up_proj",
    "1.attention.key": "mixer.k_proj",
}.items():
    kernel = attrgetter(path)(model.blocks[int(key[0])]).kernel[...]
    np.testing.assert_array_equal(weights[f"mixed.layers.{key}.weight"], kernel.T)

assert MixedLanguageModelConfig in architectures()
assert isinstance(config_of("mixed", 1).model, MixedLanguageModelConfig)

save_file(weights, "mixed.safetensors")
for read in (load_pretrained("mixed.safetensors"), from_weights(weights)):
    assert dataclasses.replace(read.config, max_length=None) == config, read.config
convert.main("--from mixed.safetensors --to b.safetensors --layout mixed-file".split())
converted = to_torch(load_pretrained("b.safetensors"))
for key, array in weights.items():
    np.testing.assert_array_equal(converted[key], array)

# LFM2 has the same layers, which have the keys of both architectures, each in a layout of its own.
sizes = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
lfm2 = LFM2LanguageModelConfig(**sizes).build(rngs=nnx.Rngs(1))
assert {"lfm2", "mixed"} <= lfm2.blocks[0].mixer.torch_layouts().keys()
assert [*lfm2.torch_layouts()] == ["hf", "hf-file"]
assert "model.layers.0.feed_forward.w1.weight" in to_torch(lfm2)
nnx.update(lfm2, nnx.state(model))
np.testing.assert_array_equal(lfm2(np.arange(9)[None])[0], model(np.arange(9)[None])[0])
"""


@pytest.mark.slow
def test_its_weights_are_read_and_converted_and_the_benchmarks_find_it(installed):
    run = installed("mixed", {"model": MODEL}, "[twinscan.models]\nmixed = mixed.model\n")
    run("-c", FOUND)
