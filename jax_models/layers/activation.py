"""The activations that can be chosen by name."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jax_models import ops

Gelu = Literal["gelu", "gelu_tanh"]
"""The exact GELU, with erf, or its approximation with tanh."""
GateActivation = Literal[Gelu, "silu"]
"""The activations of a gated MLP's gate."""
MLPActivation = Literal[GateActivation, "relu2"]
"""The activations of an MLP without a gate, and of experts. `relu2` is the square of the relu."""
MixerActivation = Literal["identity", "gelu", "relu", "sigmoid", "silu", "softplus", "tanh"]
"""The activations of safari's Hyena, applied before its output projection."""

ACTIVATIONS: dict[MLPActivation | MixerActivation, Callable[[Array], Array]] = {
    "identity": lambda x: x,
    "gelu": lambda x: ops.gelu(x),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
    "tanh": jnp.tanh,
}
