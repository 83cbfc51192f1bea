"""Convert a layer's parameters to a torch `state_dict`, and back."""

from jax_models.weights.tables import (
    Layouts,
    Table,
    Weight,
    dense,
    embedding,
    gates,
    layer_norm,
    linear,
    nested,
    rms_norm,
    same,
    squeezed,
    stacked,
    summed,
    tied,
    transposed,
)
from jax_models.weights.transfer import from_torch, to_torch

__all__ = [
    "Layouts",
    "Table",
    "Weight",
    "dense",
    "embedding",
    "from_torch",
    "gates",
    "layer_norm",
    "linear",
    "nested",
    "rms_norm",
    "same",
    "squeezed",
    "stacked",
    "summed",
    "tied",
    "to_torch",
    "transposed",
]
