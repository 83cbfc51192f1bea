"""Compares a language model with that of another package."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch
from scipy.stats import ks_2samp

from jax_models import to_torch
from parity_tests import assert_parity


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
    weights = dict(model.state_dict())
    with jax.enable_x64(True):
        port = load(weights, param_dtype="float64")
        jax.tree.map(np.testing.assert_array_equal, to_torch(port, layout), weights)
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
        assert equal or distance.statistic < 3.15 / a.size**0.5, key
