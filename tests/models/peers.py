"""Compares a language model with that of another package."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch
from scipy.stats import ks_2samp

from jax_models import to_torch
from parity_tests import assert_parity
from parity_tests.engine.bounds.torch_rounding import InFloat64
from parity_tests.engine.problem import in_every_dtype


def randomise(model: torch.nn.Module) -> None:
    """Draws all parameters and the biases of experts, with values that are exact in bfloat16.

    Matrices keep the scale of their inputs, and the scales of norms are around one.
    """
    rng = np.random.default_rng(0)
    names = "expert_bias", "correction_bias"
    biases = (each for name, each in model.named_buffers() if name.endswith(names))
    for parameter in (*model.parameters(), *biases):
        fan_in = parameter.shape[-1] if parameter.ndim > 1 else 4
        draw = rng.standard_normal(tuple(parameter.shape)) * fan_in**-0.5
        if (parameter == 1).all():
            draw = draw + 1
        parameter.data = torch.from_numpy(in_every_dtype(draw)).to(parameter.dtype)


def call_transformers(model: torch.nn.Module, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    """The logits of a model of transformers."""
    return model(tokens, use_cache=False, **options).logits


def logits_of(model: torch.nn.Module, tokens: np.ndarray, **options: Any) -> np.ndarray:
    """The same in float64, even where transformers would cast to float32."""
    with InFloat64(), torch.no_grad():
        return call_transformers(model, torch.as_tensor(tokens), **options).numpy()


def assert_close(got: Any, expected: np.ndarray, tolerance: float = 1e-11) -> None:
    """Asserts equality except for rounding, which is that of float64 by default."""
    atol = tolerance * np.abs(expected).max()
    np.testing.assert_allclose(got, expected, rtol=0, atol=atol)


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The `state_dict`, without the decays of MiniMax, which are functions of its config."""
    decays = ".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay"
    return {key: a for key, a in model.state_dict().items() if not key.endswith(decays)}


def assert_same_logits_and_gradients(
    model: torch.nn.Module,
    load: Callable[..., Any],
    tokens: np.ndarray,
    layout: str,
    call_twin: Callable[..., Any] | None = None,
    call: Callable[..., Any] = lambda port, tokens: port(tokens)[0],
) -> None:
    """Compares the port that `load` makes with the package's model, in float64.

    The exported weights must equal the package's. The registry compares the port with its twin in
    the other dtypes.
    """
    with jax.enable_x64(True):
        port = load(dict(model.state_dict()), param_dtype="float64")
        jax.tree.map(np.testing.assert_array_equal, to_torch(port, layout), weights_of(model))
    options = {"weights": layout, "call": call, "call_twin": call_twin, "dtypes": ["float64"]}
    assert_parity(model, port, tokens, **options)


def assert_same_start(ours: Mapping[str, Any], original: Mapping[str, torch.Tensor]) -> None:
    """Compares the distribution of each initial parameter with that of the package.

    The statistic of Kolmogorov and Smirnov exceeds the bound with a probability of 1e-4. Constants
    and functions of the channel have to be equal except for rounding.
    """
    assert ours.keys() == original.keys()
    for key, tensor in original.items():
        a, b = (np.sort(np.ravel(x).astype(float)) for x in (ours[key], tensor.detach().numpy()))
        equal = np.allclose(a, b, rtol=1e-4, atol=1e-6)
        distance: Any = ks_2samp(a, b)
        bound = 3.15 / a.size**0.5
        assert equal or distance.statistic < bound < 1, key
