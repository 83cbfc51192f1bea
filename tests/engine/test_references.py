"""Torch modules that are difficult references: they tie weights or have zero gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity_tests import compare, record

pytestmark = pytest.mark.usefixtures("standard_promotion")


class Attention(torch.nn.Module):
    """Its key bias shifts all scores equally, so that its gradient is only rounding errors."""

    def __init__(self):
        super().__init__()
        self.query, self.key = (torch.nn.Linear(5, 5) for _ in range(2))

    def forward(self, x):
        return torch.softmax(self.query(x) @ self.key(x).mT, -1) @ x


def attention(weights, x, factor=1.0):
    """The same attention, with scores that are too large by a factor."""
    q, k = (
        x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"][None] for name in ("query", "key")
    )
    return jax.nn.softmax(factor * q @ k.mT, -1) @ x


@pytest.mark.parametrize("factor", [1.0, 1 + 1e-5])
def test_a_gradient_of_rounding_errors_alone_excuses_no_other(factor):
    x = np.random.default_rng(0).standard_normal((7, 5))
    report = compare(Attention(), partial(attention, factor=factor), x, weights=dict)
    assert report.passed == (factor == 1), str(report)
    assert not any(e.unstable for groups in report.errors.values() for e in groups.values())


class Tied(torch.nn.Module):
    """Uses its embedding as the head."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 5)
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.embedding(tokens)))


@pytest.mark.parametrize("key", ["head.weight", "embedding.weight"])
def test_tied_weights_through_a_loader(key):
    report = compare(
        Tied(),
        lambda w, tokens: jnp.tanh(w[tokens]) @ w.T,
        np.array([[3, 1, 6]]),
        weights=lambda state_dict: state_dict[key],
    )
    assert report.passed, str(report)


@pytest.mark.parametrize("part", ["whole", "conjugate"])
def test_complex_results_and_their_gradients(part):
    def spectrum(weights, x):
        y = jnp.fft.rfft(x @ weights["weight"].T + weights["bias"][None])
        return y.conj() if part == "conjugate" else y

    report = compare(
        torch.nn.Linear(4, 4),
        spectrum,
        np.random.default_rng(0).standard_normal((3, 4)),
        weights=dict,
        call_twin=lambda twin, x: torch.fft.rfft(twin(x)),
    )
    assert report.passed == (part == "whole"), str(report)


def test_onnx_models_are_refused_with_what_to_do():
    onnx = pytest.importorskip("onnx")
    for twin in ("encoder.onnx", onnx.ModelProto()):
        with pytest.raises(TypeError, match=r"run the model in PyTorch.*`record`.*from_onnx"):
            compare(twin, lambda weights, x: x, np.ones((2, 3)), weights=dict)
        with pytest.raises(TypeError, match="ONNX models are no longer references"):
            record(twin, np.ones((2, 3)), path="never-written.safetensors")
