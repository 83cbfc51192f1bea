"""Conversion of Keras's LSTM, GRU, SimpleRNN, RNN and Bidirectional layers."""

__all__ = ["from_keras", "keras_table"]

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jax_models.importers.recurrent import Kind, loaded, reordered
from jax_models.layers.bidirectional import Bidirectional
from jax_models.layers.gru import GRU
from jax_models.layers.lstm import LSTM
from jax_models.layers.recurrent import RecurrentStack
from jax_models.layers.reversed import Reversed
from jax_models.layers.rnn import RNN
from jax_models.layers.stack import Stack
from jax_models.options import FloatingDtype, Index, checked_options, described
from jax_models.weights import Table, Weight, nested, same, stacked, summed
from jax_models.weights.layouts import params_of

KINDS: dict[str, Kind] = {"SimpleRNN": RNN, "LSTM": LSTM, "GRU": GRU}
UNSUPPORTED = {
    "stateful": "set it to False, and pass the state that each call returns to the next call",
    "time_major": "set it to False, and swap the first two axes of x and y around the call",
}
"""Options of Keras's layers that change what a call does, and what to do instead."""
TWO_GATES_SWAPPED = (1, 0, 2)
"""Swaps the first two gates: Keras's GRU has them in the order z, r, h, and ours in r, z, n."""


@checked_options
def from_keras(
    layer: Any, *, dtype: FloatingDtype | None = None
) -> RecurrentStack | Stack | Reversed | Bidirectional:
    """Converts a recurrent layer of Keras, with its weights.

        >>> import keras
        >>> gru = keras.layers.GRU(4, return_sequences=True)
        >>> gru.build((None, None, 3))
        >>> layer = from_keras(gru)

    x and y are the input and output of the Keras layer with `return_sequences=True`. The state's
    arrays are Keras's states with a leading axis of size 1. For a Keras mask that marks padding at
    the end, pass `lengths=mask.sum(axis=1)`, and at the start, `starts=(~mask).sum(axis=1)`. In the
    padding, Keras repeats the last output unless `zero_output_for_mask` is set, whereas the layer
    returned here outputs zeros. With `go_backwards` the layer is a `Reversed`, whose
    outputs are in the order of x, whereas Keras returns them in reverse. A `Bidirectional` becomes
    a `Bidirectional`, and an `RNN` of a list of cells becomes a `Stack`, whose state is a tuple of
    the layers' states. No layer of this package keeps a state between calls, so a `stateful` layer
    is refused: pass the returned state to the next call. Dropout, regularizers and constraints,
    which only training uses, are left out. Keras itself is not imported. To write the weights back
    to Keras, use `keras_table`.

    Args:
        layer: a built `keras.layers.LSTM`, `GRU` or `SimpleRNN`, an `RNN` of one or several of
            their cells, or a `Bidirectional` of these that joins its outputs
            (`merge_mode="concat"`).
        dtype: the computation's dtype. None: that of Keras's dtype policy, such as bfloat16 for
            "mixed_bfloat16".

    Raises:
        TypeError: `layer` is not a layer of Keras.
        ValueError: the layer or one of its cells is of another class, is not built, is stateful, or
            has an activation or a merge mode that no layer of this package supports.

    """
    if not hasattr(layer, "built"):
        package = type(layer).__module__.partition(".")[0]
        raise TypeError(f"layer: expected a layer of Keras, got {described(layer)} of {package}")
    kind = type(layer).__name__
    if kind == "Bidirectional":
        if layer.merge_mode != "concat":
            raise ValueError(f"layer: expected merge_mode 'concat', got {layer.merge_mode!r}")
        forward, backward = layer.forward_layer, layer.backward_layer
        if forward.go_backwards or not backward.go_backwards:
            raise ValueError("layer: expected a forward layer that goes forward, and one backward")
        return Bidirectional(_one_direction(forward, dtype), _one_direction(backward, dtype))
    ours = _one_direction(layer, dtype)
    return Reversed(ours) if layer.go_backwards else ours


@checked_options
def keras_table(
    layer: RecurrentStack | Stack | Reversed | Bidirectional, index: Index | None = None
) -> Table:
    """The weights of a layer under Keras's names: a `layout` of `to_torch` and `from_torch`.

        >>> layer = GRU(5, 6, rngs=nnx.Rngs(0))
        >>> weights = to_torch(layer, keras_table(layer))

    With several layers or directions, the keys are numbered, as in `1.kernel`, in the order in
    which `set_weights` of Keras's `Bidirectional`, or of its `RNN` of several cells, takes the
    arrays. Where Keras has one bias and our layer has two, Keras's bias is their sum.

    Args:
        layer: an `LSTM`, `GRU`, `RNN`, or a `Stack`, `Reversed` or `Bidirectional` of them.
        index: the number of one layer, to exchange weights with a single Keras layer. The keys then
            have no numbers, and `from_torch` leaves the other layers unchanged. With two
            directions, 2 l is the forward direction of layer l, and 2 l + 1 its backward direction.
            None: all layers.

    Raises:
        TypeError: the layer is of another class.
        ValueError: `index` is not less than the number of layers, or the layer has a projection or
            peepholes, which Keras does not have.

    """
    tables = [*_tables(layer)]
    if index is None:
        numbered = len(tables) > 1
        return [
            row
            for i, table in enumerate(tables)
            for row in nested(table, "", str(i) if numbered else "")
        ]
    if index >= len(tables):
        raise ValueError(f"index: expected less than the {len(tables)} layers, got {index}")
    others = [row for i, table in enumerate(tables) if i != index for row in table]
    return [*tables[index], *(_unchanged(layer, path) for row in others for path in row.params)]


def _tables(layer: Any) -> Iterator[Table]:
    """Yields a table for each of the Keras layers that together correspond to a layer."""
    if isinstance(layer, RecurrentStack):
        yield from (_table_of_cell(layer, i) for i in range(len(layer.cells)))
        return
    if isinstance(layer, Stack):
        parts = {f"layers.{i}": part for i, part in enumerate(layer.layers)}
    elif isinstance(layer, Bidirectional):
        parts = {"forward": layer.forward, "backward": layer.backward}
    elif isinstance(layer, Reversed):
        parts = {"layer": layer.layer}
    else:
        raise TypeError(
            "layer: expected an LSTM, GRU or RNN, or a Stack, Reversed or Bidirectional of them, "
            f"got a {type(layer).__name__}"
        )
    for name, part in parts.items():
        yield from (nested(table, name, "") for table in _tables(part))


def _table_of_cell(layer: RecurrentStack, i: int) -> Table:
    cell, at = layer.cells[i], f"cells.{i}"
    if layer.proj_features or cell.peephole is not None:
        raise ValueError(
            "layer: expected no projection and no peepholes, which Keras does not have"
        )
    order = TWO_GATES_SWAPPED if isinstance(layer, GRU) else range(len(layer.gate_names))
    params = (f"{at}.bias_ih", f"{at}.bias_hh")
    table = [same(f"{at}.kernel_ih", "kernel"), same(f"{at}.kernel_hh", "recurrent_kernel")]
    if cell.bias_hh is not None:
        two_biases = isinstance(layer, GRU) and layer.reset_after
        table.append(stacked(params, "bias") if two_biases else summed(params, "bias"))
    elif cell.bias_ih is not None:
        table.append(same(params[0], "bias"))
    return [_with_gate_order(row, order) for row in table]


def _unchanged(layer: Any, path: str) -> Weight:
    """Returns a row for a parameter without a key, whose value import leaves unchanged."""

    def value() -> tuple[Any]:
        array = params_of(layer)[path].get_value()
        if isinstance(array, jax.ShapeDtypeStruct):
            raise ValueError("it has no value to keep: load the weights of all layers together")
        return (array,)

    return Weight((path,), (), value, lambda array: ())


def _with_gate_order(row: Weight, order: Sequence[int]) -> Weight:
    """Reorders the gates of a row's key. The order is a permutation that is its own inverse."""
    return row._replace(
        to_jax=lambda a: row.to_jax(reordered(a, order)),
        to_torch=lambda *values: tuple(reordered(a, order) for a in row.to_torch(*values)),
    )


def _one_direction(layer: Any, dtype: Any) -> RecurrentStack | Stack:
    kind = type(layer).__name__
    if kind not in (*KINDS, "RNN"):
        expected = f"{', '.join(KINDS)}, RNN or Bidirectional of Keras"
        raise ValueError(f"layer: expected {expected}, got {kind}")
    if not layer.built:
        raise ValueError(f"layer: {layer.name} has no weights yet: build it, or call it once")
    for option, instead in UNSUPPORTED.items():
        if getattr(layer, option, False):
            raise ValueError(f"layer: {layer.name}: expected {option}=False, got True: {instead}")
    if type(layer.cell).__name__ == "StackedRNNCells":
        return Stack([_of_cell(cell, dtype) for cell in layer.cell.cells])
    return _of_cell(layer.cell, dtype)


def _of_cell(cell: Any, dtype: Any) -> RecurrentStack:
    kind = type(cell).__name__.removesuffix("Cell")
    if kind not in KINDS:
        expected = ", ".join(f"{name}Cell" for name in KINDS)
        raise ValueError(f"layer: expected cells of {expected}, got {type(cell).__name__}")
    # Refuse activations that the layer of this package does not have.
    config = cell.get_config()
    activations = ("tanh", "relu") if kind == "SimpleRNN" else ("tanh",)
    for name, expected in (("activation", activations), ("recurrent_activation", ("sigmoid",))):
        if config.get(name, expected[0]) not in expected:
            raise ValueError(
                f"layer: {type(cell).__name__} {cell.name}: expected {name} "
                f"{' or '.join(map(repr, expected))}, got {config[name]!r}"
            )
    if dtype is None and cell.compute_dtype != cell.variable_dtype:
        dtype = cell.compute_dtype
    # The remaining settings become options of the layer, whose sizes come from the weights.
    options: dict[str, Any] = {}
    if kind == "SimpleRNN":
        options["nonlinearity"] = config["activation"]
    if kind == "GRU":
        options["reset_after"] = config["reset_after"]
    names = ["kernel", "recurrent_kernel", "bias"]
    weights = dict(zip(names, map(np.asarray, cell.get_weights()), strict=False))
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
