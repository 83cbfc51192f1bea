"""Conversion of LSTM, GRU and RNN nodes of ONNX models."""

__all__ = ["from_onnx", "onnx_table"]

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jax_models.importers.recurrent import Kind, loaded, reordered
from jax_models.layers.gru import GRU
from jax_models.layers.lstm import LSTM
from jax_models.layers.recurrent import RecurrentStack
from jax_models.layers.reversed import Reversed
from jax_models.layers.rnn import RNN
from jax_models.options import FloatingDtype, checked_options
from jax_models.weights import Table, Weight
from jax_models.weights.rows import namespace

KINDS: dict[str, Kind] = {"RNN": RNN, "LSTM": LSTM, "GRU": GRU}
ORDERS = {RNN: (0,), LSTM: (0, 3, 1, 2), GRU: (1, 0, 2)}
"""For each of ONNX's gates, its place in this package. ONNX orders an LSTM's gates i, o, f, c and a
GRU's z, r, h.
"""
ACTIVATIONS = {"RNN": ("tanh",), "LSTM": ("sigmoid", "tanh", "tanh"), "GRU": ("sigmoid", "tanh")}
INPUTS = ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P")
WEIGHTS = ("W", "R", "B", "P")
ATTRIBUTES = {"direction", "hidden_size", "layout", "linear_before_reset", "activations"}
"""The attributes from which a layer is built. `clip` must be absent, and all others absent or 0."""


@checked_options
def from_onnx(
    model: Any,
    node: str | None = None,
    weights: Mapping[str, Any] | None = None,
    *,
    dtype: FloatingDtype | None = None,
) -> RecurrentStack | Reversed:
    """Converts an `LSTM`, `GRU` or `RNN` node of an ONNX model to a layer.

        >>> import onnx
        >>> node = onnx.helper.make_node("GRU", ["X", "W", "R"], ["Y"], hidden_size=4)
        >>> graph = onnx.helper.make_graph([node], "a", [], [])
        >>> weights = {"W": jnp.ones((1, 12, 3)), "R": jnp.ones((1, 12, 4))}
        >>> layer = from_onnx(onnx.helper.make_model(graph), weights=weights)

    The node's input `X` is the layer's x, which is time-major if the node has `layout=0`. The
    output `Y`, (time, directions, batch, hidden), is the layer's y, (time, batch, directions ·
    hidden). `sequence_lens` corresponds to `lengths`, `initial_h` and `initial_c` to the state
    before the first step, and `Y_h` and `Y_c` to the state after the last. With `layout=1`, ONNX
    stores states as (batch, directions, hidden). A node of direction `reverse` becomes a
    `Reversed`. To write the weights back, use `onnx_table`.

    Args:
        model: an `onnx.ModelProto`, as returned by `onnx.load`.
        node: the name of the node or of one of its outputs. None: the model's only recurrent node.
        weights: weights that are not stored in the graph, by their names in the graph.
        dtype: the computation's dtype.

    Raises:
        ImportError: the package `onnx` is not installed.
        TypeError: `model` is not a ModelProto.
        ValueError: no node or several nodes match; a weight is missing, has the wrong shape, or is
            computed in the graph; or the node has an attribute that no layer supports.

    """
    try:
        import onnx
    except ImportError:
        raise ImportError("from_onnx needs the package onnx: pip install onnx") from None
    if not isinstance(model, onnx.ModelProto):
        raise TypeError(f"model: expected an onnx.ModelProto, got {type(model).__name__}")
    every = [*graphs(model.graph)]
    proto = _select_node([n for graph in every for n in graph.node if n.op_type in KINDS], node)
    where = f"{proto.op_type} {proto.name or proto.output[0] or proto.output[1]}"
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in proto.attribute}

    # Weights are constants of the graph: its initializers, and the outputs of Constant nodes.
    held = {tensor.name: tensor for graph in every for tensor in graph.initializer}
    held |= {
        n.output[0]: a.t
        for graph in every
        for n in graph.node
        for a in n.attribute
        if n.op_type == "Constant" and a.name == "value"
    }
    names = dict(zip(INPUTS, proto.input, strict=False))
    for name in ("sequence_lens", "initial_h", "initial_c"):
        constant = held.get(names.get(name, ""))
        if constant is None:
            continue
        if name == "sequence_lens" or onnx.numpy_helper.to_array(constant).any():
            raise ValueError(f"{where}: {name} is a constant of the graph, which no layer holds")
    # Weights that the caller gives take precedence over those of the graph.
    given = held | dict(weights or {})
    needed = {key: names[key] for key in WEIGHTS if names.get(key)}
    if missing := [f"{key} ({name})" for key, name in needed.items() if name not in given]:
        raise ValueError(
            f"{where}: the graph does not hold {', '.join(missing)}: give `weights`, or fold the "
            "graph's constants first"
        )
    arrays = {
        key: onnx.numpy_helper.to_array(weight)
        if isinstance(weight := given[name], onnx.TensorProto)
        else np.asarray(weight)
        for key, name in needed.items()
    }
    return _layer(where, proto.op_type, attributes, arrays, dtype)


@checked_options
def onnx_table(layer: LSTM | GRU | RNN) -> Table:
    """The weights of a layer under ONNX's names `W`, `R`, `B` and `P`: a `layout` of `to_torch`.

        >>> layer = LSTM(5, 6, bidirectional=True, rngs=nnx.Rngs(0))
        >>> weights = to_torch(layer, onnx_table(layer))

    Raises:
        TypeError: the layer is not an `LSTM`, `GRU` or `RNN`. For a `Reversed`, give its `layer`.
        ValueError: the layer has several layers, a projection, or only one of the two biases, none
            of which an ONNX node can have.

    """
    if not isinstance(layer, tuple(ORDERS)):
        raise TypeError(f"layer: expected an LSTM, GRU or RNN, got a {type(layer).__name__}")
    first = layer.cells[0]
    if (
        layer.num_layers > 1
        or layer.proj_features
        or (first.bias_ih is None) != (first.bias_hh is None)
    ):
        raise ValueError("layer: expected one layer without a projection, with both biases or none")
    # ONNX orders the gates differently, and stores all directions, and both biases of each, in
    # one array.
    directions = range(layer.num_directions)
    to_onnx = next(order for kind, order in ORDERS.items() if isinstance(layer, kind))

    def row(key: str, order: Sequence[int], *names: str) -> Weight:
        params = tuple(f"cells.{d}.{name}" for d in directions for name in names)
        to_ours = tuple(int(i) for i in np.argsort(order))

        def to_jax(a: Any) -> tuple[Any, ...]:
            arrays = a.reshape(len(params), -1, *a.shape[2:])
            return tuple(reordered(array.T, to_ours) for array in arrays)

        def to_torch(*arrays: Any) -> tuple[Any]:
            a = namespace(arrays[0]).stack([reordered(array, order).T for array in arrays])
            return (a.reshape(len(directions), -1, *a.shape[2:]),)

        return Weight(params, (key,), to_jax, to_torch)

    table = [row("W", to_onnx, "kernel_ih"), row("R", to_onnx, "kernel_hh")]
    if first.bias_ih is not None:
        table.append(row("B", to_onnx, "bias_ih", "bias_hh"))
    if first.peephole is not None:
        table.append(row("P", (0, 2, 1), "peephole"))  # from i, f, o to ONNX's order i, o, f
    return table


def graphs(graph: Any) -> Iterator[Any]:
    """A graph and the subgraphs in its nodes, such as loop bodies."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from graphs(inner)


def _select_node(nodes: list[Any], name: str | None) -> Any:
    found = [n for n in nodes if name is None or name in (n.name, *n.output)]
    if len(found) == 1:
        return found[0]
    named = [n.name or next(filter(None, n.output)) for n in nodes]
    expected = f"one of {named}" if nodes else "a model with an LSTM, a GRU or an RNN"
    raise ValueError(f"node: expected {expected}, got {name!r}")


def _layer(
    where: str, op_type: str, attributes: dict[str, Any], arrays: dict[str, np.ndarray], dtype: Any
) -> RecurrentStack | Reversed:
    # Refuse attributes and shapes that no layer of this package can represent.
    for name in attributes.keys() - ATTRIBUTES:
        if name == "clip" or np.any(attributes[name]):
            raise ValueError(f"{where}: no layer has its {name}={attributes[name]}")
    direction = attributes.get("direction", b"forward").decode()
    count = 2 if direction == "bidirectional" else 1
    for key, array in arrays.items():
        rank = 3 if key in ("W", "R") else 2
        if array.ndim != rank or len(array) != count:
            raise ValueError(
                f"{where}: {key}: expected {rank} axes, the first of {count} for direction "
                f"{direction}, got shape {array.shape}"
            )
    # The remaining attributes become options of the layer.
    options: dict[str, Any] = {}
    given = [a.decode().lower() for a in attributes.get("activations", [])]
    if op_type == "RNN" and given == ["relu"] * count:
        options["nonlinearity"] = "relu"
    elif given not in ([], [*ACTIVATIONS[op_type]] * count):
        raise ValueError(f"{where}: no layer has its activations {given}")
    if op_type == "GRU":
        options["reset_after"] = bool(attributes.get("linear_before_reset", 0))
    if op_type == "LSTM":
        options["use_peepholes"] = "P" in arrays
    layer = loaded(
        KINDS[op_type],
        arrays,
        onnx_table,
        dtype,
        in_features=arrays["W"].shape[2],
        hidden_features=arrays["R"].shape[2],
        bidirectional=count == 2,
        use_bias="B" in arrays,
        time_major=attributes.get("layout", 0) == 0,
        **options,
    )
    return Reversed(layer) if direction == "reverse" else layer
