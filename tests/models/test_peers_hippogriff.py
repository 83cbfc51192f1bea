"""Compares hippogriff's language model with the package.

The package imports its scan, attention and rotary positions from CUDA extensions. This file defines
them as their documentation describes them.
"""

import importlib
import sys
import types
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flax import nnx
from peers import assert_same_logits_and_gradients, assert_same_start

from jax_models import HippogriffLanguageModelConfig, from_torch, to_torch

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("peers")]

WINDOW = 5
C = 5.0
SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "num_layers": 2,
    "dim": 16,
    "smqa_head_dim": 4,
    "smqa_window_size": WINDOW,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "one head of keys": {},
    "two heads of keys": {"smqa_head_dim": 2, "smqa_q_heads": 8, "smqa_kv_heads": 2},
    "other widths": {
        "hawk_expansion_factor": 1.3,
        "hawk_kernel_size": 3,
        "gmlp_expansion_factor": 1.5,
    },
}
TOKENS = np.random.default_rng(0).integers(0, 23, (2, 40))


def scan(gates: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Computes `h_t = gates_t h_{t−1} + tokens_t` on arrays (batch, features, time)."""
    h, states = torch.zeros_like(tokens[..., 0]), []
    for gate, token in zip(gates.unbind(-1), tokens.unbind(-1), strict=True):
        h = gate * h + token
        states.append(h)
    return torch.stack(states, dim=-1)


def flash_attn_func(q, k, v, *, causal: bool, window_size: tuple[int, int]) -> torch.Tensor:
    """Softmax attention of (batch, time, heads, size). A negative window means none."""
    assert (causal, window_size[1]) == (True, 0)
    k, v = (each.repeat_interleave(q.shape[2] // each.shape[2], dim=2) for each in (k, v))
    step = torch.arange(q.shape[1])
    distance = step[:, None] - step
    unseen = distance < 0
    if window_size[0] >= 0:
        unseen |= distance > window_size[0]
    scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1)
    return torch.einsum("bhts,bshd->bthd", weights, v).contiguous()


def as_meant(q, k, v, *, causal: bool, window_size: tuple[int, int]) -> torch.Tensor:
    """Attention with the window that hippogriff intends, but passes with the wrong sign."""
    return flash_attn_func(q, k, v, causal=causal, window_size=(-window_size[0], window_size[1]))


class RotaryEmbedding(torch.nn.Module):
    """Rotates the two halves of each head, in q and in the keys of kv."""

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim

    def forward(self, q, kv):
        frequencies = 10_000.0 ** (-torch.arange(0, self.dim, 2, dtype=q.dtype) / self.dim)
        angle = torch.arange(q.shape[1], dtype=q.dtype)[:, None] * frequencies
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]

        def turned(x):
            z = torch.complex(*x.chunk(2, dim=-1)) * turn
            return torch.cat([z.real, z.imag], dim=-1)

        return turned(q), torch.stack([turned(kv[:, :, 0]), kv[:, :, 1]], dim=2)


@pytest.fixture
def package(request, monkeypatch):
    """The module of the package, with one of two windows for its attention."""
    for name, contents in {
        "accelerated_scan": {},
        "accelerated_scan.warp": {"scan": scan},
        "flash_attn": {"flash_attn_func": request.param},
        "flash_attn.layers": {},
        "flash_attn.layers.rotary": {"RotaryEmbedding": RotaryEmbedding},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "hippogriff", raising=False)
    pytest.importorskip("hippogriff")
    module = importlib.import_module("hippogriff")
    monkeypatch.delitem(sys.modules, "hippogriff")
    return module, WINDOW + 1 if request.param is as_meant else TOKENS.shape[1]


def built(module: Any, **options: Any) -> torch.nn.Module:
    """A model that is built as its users do, with random weights and biases."""
    torch.manual_seed(0)
    model = module.GriffinLM(module.GriffinConfig(**SIZES | options)).double()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def port(weights: Any, *, param_dtype: str, **options: Any) -> Any:
    config = HippogriffLanguageModelConfig.from_state_dict(weights, **options)
    return from_torch(config.build(param_dtype=param_dtype, rngs=nnx.Rngs(0)), weights)


@pytest.mark.parametrize(
    ("package", "name"),
    [(flash_attn_func, "one head of keys"), *((as_meant, name) for name in OPTIONS)],
    indirect=["package"],
)
def test_logits_and_gradients_are_those_of_the_package(package, name):
    module, window = package
    model = built(module, **OPTIONS[name])
    num_kv_heads = OPTIONS[name].get("smqa_kv_heads", 1)
    load = partial(port, window=window, num_kv_heads=num_kv_heads)
    assert_same_logits_and_gradients(model, load, TOKENS, "hippogriff")


class LaterBlock(torch.nn.Module):
    """A block of version 0.0.3, which PyPI does not have, made of the parts of a block of 0.0.2.

    It runs the attention first, or has none, and its Hawk stores the logarithm of `C`.
    """

    def __init__(self, block: torch.nn.Module, *, attention: bool, convolution: bool):
        super().__init__()
        names = {"time": "hawk", "gmlp": "hawk_gmlp"}
        if attention:
            names = {"smqa": "smqa", "smqa_gmlp": "smqa_gmlp"} | names
        for name, before in names.items():
            self.add_module(f"{name}_norm", block.get_submodule(f"{before}_norm"))
            self.add_module(name, block.get_submodule(before))
        self.names, hawk = names, block.get_submodule("hawk")
        log_c = torch.nn.Parameter(torch.tensor([C]).double().log(), requires_grad=False)
        hawk.register_parameter("alpha_log_scale", log_c)
        if not convolution:
            hawk.add_module("conv", torch.nn.Identity())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            x = x + self.get_submodule(name)(self.get_submodule(f"{name}_norm")(x))
        return x


@pytest.mark.parametrize("package", [as_meant], indirect=True)
@pytest.mark.parametrize(("attention", "convolution"), [(True, True), (False, False)])
def test_version_003_is_that_of_its_parts(package, attention, convolution, monkeypatch):
    """The parts compute with c = 8, so that softplus is multiplied by C / 8 instead."""
    module, window = package
    softplus = module.softplus
    monkeypatch.setattr(module, "softplus", lambda x: softplus(x) * (C / 8))
    model = built(module)
    blocks = model.get_submodule("backbone")
    parts = {"attention": attention, "convolution": convolution}
    model.add_module("backbone", torch.nn.ModuleList(LaterBlock(b, **parts) for b in blocks))
    load = partial(port, window=window) if attention else port
    assert_same_logits_and_gradients(model, load, TOKENS, "hippogriff")


@pytest.mark.parametrize("package", [flash_attn_func], indirect=True)
def test_parameters_start_as_in_the_package(package):
    torch.manual_seed(0)
    sizes = {"vocab_size": 200, "dim": 64, "smqa_head_dim": 16}
    original = package[0].GriffinLM(package[0].GriffinConfig(**SIZES | sizes)).state_dict()
    config = HippogriffLanguageModelConfig.from_state_dict(original)
    assert_same_start(to_torch(config.build(rngs=nnx.Rngs(0)), "hippogriff"), original)
