"""LSTM, GRU, SimpleRNN and Bidirectional layers of Keras."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jax_models.importers.recurrent import Kind, loaded, reordered
from jax_models.layers.bidirectional import Bidirectional
from jax_models.layers.gru import GRU
from jax_models.layers.lstm import LSTM
from jax_models.layers.recurrent import RecurrentStack
from jax_models.layers.reversed import Reversed
from jax_models.layers.rnn import RNN
from jax_models.options import FloatingDtype, checked_options
from jax_models.weights import Table, Weight, same, summed
from jax_models.weights.rows import namespace

KINDS: dict[str, Kind] = {"SimpleRNN": RNN, "LSTM": LSTM, "GRU": GRU}
TWO_GATES_SWAPPED = (1, 0, 2)
"""A GRU of Keras has z, r, h, ours r, z, n. An LSTM has our order."""


@checked_options
def from_keras(
    layer: Any, *, dtype: FloatingDtype | None = None
) -> RecurrentStack | Reversed | Bidirectional:
    """A recurrent layer of Keras, with its weights.

        >>> import keras
        >>> theirs = keras.layers.GRU(4, return_sequences=True)
        >>> theirs.build((None, None, 3))
        >>> layer = from_keras(theirs)

    x and y are Keras's with `return_sequences`, and the state's arrays are Keras's states with an
    axis of 1 before them. A mask of padding at the end is `lengths=mask.sum(axis=1)`; Keras repeats
    the last output there, ours is zero. With `go_backwards` the layer is a `Reversed`, whose
    outputs stand at their own steps; Keras returns them in reverse. A `Bidirectional` is a
    `Bidirectional`. Dropout is left out. Keras itself is not imported. `keras_table` writes the
    weights back.

    Args:
        layer: `keras.layers.LSTM`, `GRU`, `SimpleRNN`, or a `Bidirectional` of them that joins its
            outputs (`merge_mode="concat"`), built.
        dtype: the computation's dtype.

    Raises:
        ValueError: the layer is another, is not built, or has an activation or a merge mode that no
            layer here has.

    """
    kind = type(layer).__name__
    if kind == "Bidirectional":
        if layer.merge_mode != "concat":
            raise ValueError(f"layer: expected merge_mode 'concat', got {layer.merge_mode!r}")
        forward, backward = layer.forward_layer, layer.backward_layer
        if forward.go_backwards or not backward.go_backwards:
            raise ValueError("layer: expected a forward layer that goes forward, and one backward")
        return Bidirectional(_one_way(forward, dtype), _one_way(backward, dtype))
    ours = _one_way(layer, dtype)
    return Reversed(ours) if layer.go_backwards else ours


@checked_options
def keras_table(layer: RecurrentStack) -> Table:
    """The weights of a layer under Keras's names: a `layout` of `to_torch`.

        >>> layer = GRU(5, 6, rngs=nnx.Rngs(0))
        >>> weights = to_torch(layer, keras_table(layer))

    Where Keras has one bias for two, it gets their sum.

    Raises:
        TypeError: the layer is no `LSTM`, `GRU` or `RNN`. Of a `Reversed` give its `layer`.
        ValueError: the layer has what none of Keras's has: several layers, both directions, a
            projection, peepholes.

    """
    cell = layer.cells[0]
    if len(layer.cells) > 1 or layer.proj_features or cell.peephole is not None:
        raise ValueError(
            "layer: expected one layer of one direction, without a projection and peepholes"
        )
    order = TWO_GATES_SWAPPED if isinstance(layer, GRU) else range(len(layer.gate_names))
    params = ("cells.0.bias_ih", "cells.0.bias_hh")
    table = [same("cells.0.kernel_ih", "kernel"), same("cells.0.kernel_hh", "recurrent_kernel")]
    if cell.bias_hh is not None:
        two_biases = isinstance(layer, GRU) and layer.reset_after
        table.append(_rows(params, "bias") if two_biases else summed(params, "bias"))
    elif cell.bias_ih is not None:
        table.append(same(params[0], "bias"))
    return [_in_order(row, order) for row in table]


def _in_order(row: Weight, order: Sequence[int]) -> Weight:
    """The row, its key's gates in another order, which is its own inverse."""

    def of_key(transform: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        return lambda *values: tuple(reordered(a, order) for a in transform(*values))

    return row._replace(
        to_jax=lambda a: row.to_jax(reordered(a, order)),
        to_torch=of_key(row.to_torch),
        gradients=row.gradients and of_key(row.gradients),
    )


def _rows(params: tuple[str, ...], key: str) -> Weight:
    """The parameters are the rows of the key's array."""
    return Weight(params, (key,), tuple, lambda *rows: (namespace(rows[0]).stack(rows),))


def _one_way(layer: Any, dtype: Any) -> RecurrentStack:
    kind = type(layer).__name__
    if kind not in KINDS:
        expected = f"{', '.join(KINDS)} or Bidirectional of Keras"
        raise ValueError(f"layer: expected {expected}, got {kind}")
    if not layer.built:
        raise ValueError(f"layer: {layer.name} has no weights yet: build it, or call it once")
    config = layer.get_config()
    options: dict[str, Any] = {}
    if kind == "SimpleRNN" and config["activation"] == "relu":
        options["nonlinearity"] = "relu"
    elif config["activation"] != "tanh":
        raise ValueError(f"layer: expected activation 'tanh', got {config['activation']!r}")
    of_gates = config.get("recurrent_activation", "sigmoid")
    if of_gates != "sigmoid":
        raise ValueError(f"layer: expected recurrent_activation 'sigmoid', got {of_gates!r}")
    if kind == "GRU":
        options["reset_after"] = config["reset_after"]
    names = ["kernel", "recurrent_kernel", "bias"]
    weights = dict(zip(names, map(np.asarray, layer.get_weights()), strict=False))
    return loaded(
        KINDS[kind],
        weights,
        keras_table,
        dtype,
        in_features=len(weights["kernel"]),
        hidden_features=config["units"],
        use_bias=config["use_bias"],
        **options,
    )
