"""Compares a language model with that of another package."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch

from jax_models import to_torch
from parity_tests import assert_parity


def assert_same_logits_and_gradients(
    model: torch.nn.Module,
    load: Callable[..., Any],
    tokens: np.ndarray,
    layout: str,
    call_twin: Callable[..., Any] | None = None,
    call: Callable[..., Any] = lambda port, tokens: port(tokens)[0],
    dtypes: tuple[str, ...] = ("float64", "float32"),
) -> None:
    """Compares the port that `load` makes with the package's float64 model, in each dtype.

    The exported weights must equal the package's.
    """
    for dtype in dtypes:
        weights = {k: w.to(getattr(torch, dtype)) for k, w in model.state_dict().items()}
        with jax.enable_x64(True):
            port = load(weights, param_dtype=dtype)
            jax.tree.map(np.testing.assert_array_equal, to_torch(port, layout), weights)
        options = {"weights": layout, "call": call, "call_twin": call_twin, "dtypes": [dtype]}
        assert_parity(model, port, tokens, **options)
