"""Builds a layer from its sizes, its options and a table of its weights, for both importers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_models.layers.gru import GRU
from jax_models.layers.lstm import LSTM
from jax_models.layers.recurrent import RecurrentStack
from jax_models.layers.rnn import RNN
from jax_models.weights import Table, from_torch
from jax_models.weights.rows import namespace

Kind = type[RNN] | type[LSTM] | type[GRU]


def loaded(
    kind: Kind,
    weights: Mapping[str, np.ndarray],
    table: Callable[[Any], Table],
    dtype: Any,
    **options: Any,
) -> RecurrentStack:
    """The layer with the given weights, in their dtype. No random weights are drawn first."""
    param_dtype = jnp.result_type(*weights.values())
    options |= {"dtype": dtype, "param_dtype": param_dtype}
    layer = nnx.eval_shape(lambda: kind(**options, rngs=nnx.Rngs(0)))
    return from_torch(layer, weights, table(layer))


def reordered(gates: Any, order: Sequence[int]) -> Any:
    """Reorders the gates, which are side by side along the last axis."""
    parts = namespace(gates).split(gates, len(order), axis=-1)
    return namespace(gates).concat([parts[i] for i in order], axis=-1)
