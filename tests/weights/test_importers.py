"""Recurrent layers of ONNX and Keras, compared with ONNX's evaluator and with Keras."""

import itertools
import os
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_models import (
    GRU,
    LSTM,
    RNN,
    Bidirectional,
    MinGRU,
    Reversed,
    Stack,
    from_keras,
    from_onnx,
    from_torch,
    keras_table,
    onnx_table,
    to_torch,
)
from parity_tests.engine.bounds.tolerance import assert_same

os.environ["KERAS_BACKEND"] = "jax"
onnx = pytest.importorskip("onnx")
ReferenceEvaluator = pytest.importorskip("onnx.reference").ReferenceEvaluator
with jax.numpy_dtype_promotion("standard"):
    keras = pytest.importorskip("keras")
helper = onnx.helper

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("peers")]

INPUTS = ("X", "W", "R", "B", "sequence_lens", "initial_h")
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
TIME, BATCH, IN, HIDDEN = 7, 3, 4, 5


def run(model: Any, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Runs a model with a single node in our layer, with ONNX's names and shapes."""
    [node] = model.graph.node
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    batch_first = attributes.get("layout", 0) == 1
    keys = ("X", "W", "R", "B", "sequence_lens", "h", "c", "P")
    names = dict(zip(keys, node.input, strict=False))
    given = {key: inputs[name] for key, name in names.items() if name}
    layer = from_onnx(model, weights=inputs)

    state = layer.init_state(given["X"].shape[0 if batch_first else 1])
    for field in set(state._fields) & given.keys():
        h = given[field].swapaxes(0, 1) if batch_first else given[field]
        state = state._replace(**{field: jnp.asarray(h)})
    y, last = layer(given["X"], state, lengths=given.get("sequence_lens"))
    y = y.reshape(*y.shape[:2], len(given["W"]), -1)
    results = {"Y": y if batch_first else y.swapaxes(1, 2)}
    for field, array in last._asdict().items():
        results[f"Y_{field}"] = array.swapaxes(0, 1) if batch_first else array
    return {name: np.asarray(array) for name, array in results.items()}


VARIANTS = [
    ("RNN", {}),
    *(("GRU", {"linear_before_reset": each}) for each in (0, 1)),
    *(("LSTM", {"peepholes": each}) for each in (False, True)),
]
DIRECTIONS = ("forward", "reverse", "bidirectional")


def random_node(op: str, direction: str, *, bias: bool = True, peepholes: bool = False, **options):
    """A model with a single node and random weights and states in float64, and its inputs."""
    rng = np.random.default_rng(0)
    directions = 2 if direction == "bidirectional" else 1
    layout = options.get("layout", 0)
    gates = GATES[op] * HIDDEN
    state = (directions, BATCH, HIDDEN)
    shapes = {
        "X": (TIME, BATCH, IN),
        "W": (directions, gates, IN),
        "R": (directions, gates, HIDDEN),
        "B": (directions, 2 * gates) if bias else None,
        "sequence_lens": None,
        "initial_h": state,
        "initial_c": state if op == "LSTM" else None,
        "P": (directions, 3 * HIDDEN) if peepholes else None,
    }
    inputs = {name: rng.standard_normal(shape) for name, shape in shapes.items() if shape}
    names = [name if shape else "" for name, shape in shapes.items()]
    names = names[: 8 if op == "LSTM" else 6]
    if layout == 1:
        for name in {"X", "initial_h", "initial_c"} & inputs.keys():
            inputs[name] = inputs[name].swapaxes(0, 1).copy()
    outputs = ["Y", "Y_h", "Y_c"][: 3 if op == "LSTM" else 2]
    node = helper.make_node(op, names, outputs, hidden_size=HIDDEN, direction=direction, **options)
    double = onnx.TensorProto.DOUBLE
    graph = helper.make_graph(
        [node],
        op,
        [helper.make_tensor_value_info(name, double, a.shape) for name, a in inputs.items()],
        [helper.make_tensor_value_info(name, double, None) for name in outputs],
    )
    return helper.make_model(graph), inputs


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("op", "options"), VARIANTS)
def test_random_nodes_are_those_of_onnx_reference_evaluator(op, direction, options, x64):
    """The exported weights are bitwise equal, too."""
    for layout, bias in ((0, True), (1, False)):
        model, inputs = random_node(op, direction, bias=bias, layout=layout, **options)
        evaluator = ReferenceEvaluator(model)
        results = run(model, inputs)
        for name, expected in zip(evaluator.output_names, evaluator.run(None, inputs), strict=True):
            assert_same(results[name], expected, name)
        layer = from_onnx(model, weights=inputs)
        layer = layer.layer if isinstance(layer, Reversed) else layer
        back = to_torch(layer, onnx_table(layer))
        assert back.keys() == inputs.keys() & {"W", "R", "B", "P"}
        for name, array in back.items():
            np.testing.assert_array_equal(array, inputs[name])


@pytest.mark.parametrize("layout", [0, 1])
def test_sequence_lens_make_each_row_as_alone(layout, x64):
    """Tests a bidirectional LSTM. ONNX's reference evaluator ignores the lengths."""
    model, inputs = random_node("LSTM", "bidirectional")
    evaluator = ReferenceEvaluator(model)
    lengths = np.array([TIME, 4, 1], np.int32)
    padded, padded_inputs = random_node("LSTM", "bidirectional", layout=layout)
    padded.graph.node[0].input[4] = "sequence_lens"
    results = run(padded, padded_inputs | {"sequence_lens": lengths})
    if layout == 1:
        results = {name: np.moveaxis(a, 0, -2) for name, a in results.items()}
    for row, length in enumerate(lengths):
        alone = {
            name: a[:, [row]] if name.startswith("initial") else a for name, a in inputs.items()
        }
        alone["X"] = inputs["X"][:length, [row]]
        expected = dict(zip(evaluator.output_names, evaluator.run(None, alone), strict=True))
        assert_same(results["Y"][:length, :, [row]], expected.pop("Y"), "Y")
        assert (results["Y"][length:, :, row] == 0).all()
        for name, array in expected.items():
            assert_same(results[name][:, [row]], array, name)


def test_a_node_is_found_by_name_in_a_branch_with_weights_in_the_graph():
    model, inputs = random_node("GRU", "forward")
    [node] = model.graph.node
    node.name = "encoder"
    held = [onnx.numpy_helper.from_array(inputs[name], name) for name in ("W", "R")]
    bias = onnx.numpy_helper.from_array(inputs["B"])
    constant = helper.make_node("Constant", [], ["B"], value=bias)
    branch = helper.make_graph([constant, node], "branch", [], [], held)
    other = random_node("LSTM", "forward")[0]
    choice = helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=other.graph)
    whole = helper.make_model(helper.make_graph([choice], "whole", [], []))
    with jax.enable_x64(True):
        layer = from_onnx(whole, "encoder")
        np.testing.assert_array_equal(to_torch(layer, onnx_table(layer))["B"], inputs["B"])
    with pytest.raises(ValueError, match="node:"):
        from_onnx(whole)


def test_other_weights_of_the_graph_are_not_read():
    """The other weights are in a file that does not exist."""
    model, inputs = random_node("GRU", "forward")
    elsewhere = onnx.TensorProto(name="huge", data_type=onnx.TensorProto.FLOAT, dims=[2**40])
    elsewhere.data_location = onnx.TensorProto.EXTERNAL
    elsewhere.external_data.add(key="location", value="missing.bin")
    model.graph.initializer.append(elsewhere)
    with jax.enable_x64(True):
        assert from_onnx(model, weights=inputs).in_features == IN


def constant(name: str, value: np.ndarray | None = None):
    def add(model, inputs):
        model.graph.node[0].input[INPUTS.index(name)] = name
        array = inputs[name] if value is None else value
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))

    return add


def attribute(**values):
    def add(model, _):
        model.graph.node[0].attribute.extend(helper.make_attribute(k, v) for k, v in values.items())

    return add


def test_a_node_with_relu(x64):
    """ONNX's evaluator does not support an RNN with relu."""
    model, inputs = random_node("RNN", "bidirectional")
    attribute(activations=["Relu", "Relu"])(model, inputs)
    layer = from_onnx(model, weights=inputs)
    assert layer.nonlinearity == "relu"
    assert (layer(inputs["X"])[0] >= 0).all()


REFUSED = [
    *((f"its clip={clip}", attribute(clip=clip)) for clip in (3.0, 0.0)),
    ("its activation_alpha", attribute(activation_alpha=[0.5, 1.0])),
    ("its activation_beta", attribute(activation_beta=[0.5, 1.0])),
    ("its input_forget=1", attribute(input_forget=1)),
    ("its output_sequence=1", attribute(output_sequence=1)),
    ("its activations", attribute(activations=["HardSigmoid", "Tanh"])),
    ("initial_h is a constant", constant("initial_h")),
    ("sequence_lens is a constant", constant("sequence_lens", np.zeros(BATCH, np.int32))),
    (r"does not hold R \(R\)", lambda model, inputs: inputs.pop("R")),
    ("B: expected", lambda model, inputs: inputs.update(B=inputs["B"][:, 1:])),
    ("W: expected", lambda model, inputs: inputs.update(W=inputs["W"][0])),
    ("node: expected", lambda model, inputs: model.graph.ClearField("node")),
]


@pytest.mark.parametrize(("message", "spoil"), REFUSED)
def test_a_node_is_refused(message, spoil, x64):
    model, inputs = random_node("GRU", "forward")
    spoil(model, inputs)
    with pytest.raises(ValueError, match=message):
        from_onnx(model, weights=inputs)


@pytest.fixture
def keras64(x64, monkeypatch):
    """Runs Keras in float64, even its tanh, which it casts to float32, and JAX as users do."""
    narrowed = import_module("keras.src.backend.common.dtypes").BIT64_TO_BIT32_DTYPE
    monkeypatch.setitem(narrowed, "float64", "float64")
    set_float = (keras.config.set_floatx, keras.config.set_dtype_policy)
    for to in set_float:
        to("float64")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    for to in set_float:
        to("float32")


def random_weights(layer: Any, shape=(BATCH, TIME, IN)) -> Any:
    """Sets all weights of a Keras layer, including biases, to random values."""
    layer.build(shape)
    rng = np.random.default_rng(0)
    layer.set_weights([0.5 * rng.standard_normal(w.shape) for w in layer.get_weights()])
    return layer


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape)


def several_cells():
    """Cells of different kinds and sizes."""
    kinds = keras.layers.LSTMCell, keras.layers.GRUCell, keras.layers.SimpleRNNCell
    return [kind(HIDDEN + i) for i, kind in enumerate(kinds)]


KERAS = {
    "LSTM": partial(keras.layers.LSTM, HIDDEN),
    "LSTM, unrolled": partial(keras.layers.LSTM, HIDDEN, unroll=True),
    "LSTM with zeros in the padding": partial(keras.layers.LSTM, HIDDEN, zero_output_for_mask=True),
    "LSTM without biases": partial(keras.layers.LSTM, HIDDEN, use_bias=False),
    "GRU": partial(keras.layers.GRU, HIDDEN),
    "GRU reset before": partial(keras.layers.GRU, HIDDEN, reset_after=False),
    "GRU without biases": partial(keras.layers.GRU, HIDDEN, use_bias=False),
    "SimpleRNN by relu": partial(keras.layers.SimpleRNN, HIDDEN, activation="relu"),
    "RNN of a cell": lambda **options: keras.layers.RNN(keras.layers.GRUCell(HIDDEN), **options),
    "RNN of cells": lambda **options: keras.layers.RNN(several_cells(), **options),
}


@pytest.mark.parametrize(
    ("name", "wrapper"),
    [
        *((name, "") for name in KERAS),
        *itertools.product(
            ("LSTM with zeros in the padding", "GRU", "SimpleRNN by relu", "RNN of cells"),
            (", go_backwards", ", Bidirectional"),
        ),
    ],
)
def test_layers_are_those_of_keras_with_masks_and_states(name, wrapper, keras64):
    """The exported weights are those of Keras, too."""
    name += wrapper
    options = {"return_sequences": True, "return_state": True}
    options |= {"go_backwards": True} if wrapper == ", go_backwards" else {}
    original = KERAS[name.removesuffix(wrapper)](**options)
    original = random_weights(
        keras.layers.Bidirectional(original) if "Bidir" in wrapper else original
    )
    ours, x = from_keras(original), drawn(BATCH, TIME, IN)
    assert isinstance(ours, Reversed) == ("go_backwards" in name)
    assert isinstance(ours, Bidirectional) == ("Bidirectional" in name)
    leaves, structure = jax.tree.flatten(ours.init_state(BATCH))
    leaves = [drawn(*leaf.shape) for leaf in leaves]
    lengths = np.array([TIME, 4, 1])
    mask = np.arange(TIME) < lengths[:, None]
    for given, masked, masks in (
        (leaves, None, {}),
        (None, mask, {"lengths": lengths}),
        (None, mask[:, ::-1], {"starts": TIME - lengths}),
    ):
        if given and "RNN of" in name and "Bidirectional" in name:
            continue  # Keras does not accept initial states here
        initial = [leaf[0] for leaf in leaves] if given else None
        if given and "RNN of cells" in name:
            initial = [initial[:2], *initial[2:]]  # an LSTM cell's state has two arrays
        y, *last = original(x, initial_state=initial, mask=masked)
        state = jax.tree.unflatten(structure, leaves) if given else None
        y_ours, last_ours = ours(x, state, **masks)
        y = np.flip(y, axis=1) if "go_backwards" in name else np.asarray(y)
        real = np.ones_like(mask) if masked is None or "zeros" in name else masked
        assert_same(y_ours[real], y[real], "outputs")
        for a, b in zip(jax.tree.leaves(last_ours), jax.tree.leaves(last), strict=True):
            assert_same(a[0], np.asarray(b), "state")
    table = keras_table(ours)
    weights = to_torch(ours, table)
    for array, expected in zip(weights.values(), original.get_weights(), strict=True):
        np.testing.assert_array_equal(array, expected)
    again = from_torch(from_keras(original), weights, table)
    for a, b in zip(*map(jax.tree.leaves, map(nnx.state, (again, ours))), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_each_layer_of_ours_is_one_of_keras(bidirectional, keras64):
    """Importing and exporting one layer does not change the others."""
    sizes = {"bidirectional": bidirectional, "param_dtype": jnp.float64}
    layer = LSTM(IN, HIDDEN, num_layers=2, **sizes, rngs=nnx.Rngs(0))
    x = y = drawn(BATCH, TIME, IN)
    names = "kernel", "recurrent_kernel", "bias"
    for i in range(2):
        original = keras.layers.LSTM(HIDDEN, return_sequences=True)
        original = keras.layers.Bidirectional(original) if bidirectional else original
        y = np.asarray(random_weights(original, y.shape)(y))
        both = [original.forward_layer, original.backward_layer] if bidirectional else [original]
        for index, one in enumerate(both, start=i * len(both)):
            weights = dict(zip(names, one.get_weights(), strict=True))
            table = keras_table(layer, index)
            layer = from_torch(layer, weights, table)
            back = to_torch(layer, table)
            assert back.keys() == weights.keys()
            for key, array in back.items():
                np.testing.assert_array_equal(array, weights[key])
    assert_same(layer(x)[0], y, "outputs")


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN of cells"])
def test_computes_in_the_dtype_of_kerass_policy(name, standard_promotion):
    x = drawn(BATCH, TIME, IN).astype(np.float32)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    original = random_weights(KERAS[name](return_sequences=True))
    keras.config.set_dtype_policy(before)
    for dtype, expected in ((None, original(x).dtype), ("float32", "float32")):
        assert from_keras(original, dtype=dtype)(x)[0].dtype == expected


REFUSED_OF_KERAS = {
    "expected SimpleRNN, LSTM, GRU, RNN or Bid": lambda: keras.layers.Dense(3),
    "a has no weights yet": lambda: keras.layers.GRU(3, name="a"),
    "LSTMCell top: expected activation 'tanh'": lambda: random_weights(
        keras.layers.RNN([keras.layers.LSTMCell(3, activation="relu", name="top")])
    ),
    "recurrent_activation": lambda: keras.layers.LSTM(3, recurrent_activation="hard_sigmoid"),
    "expected cells of": lambda: keras.layers.RNN(
        [keras.layers.StackedRNNCells([keras.layers.GRUCell(3)])]
    ),
    "top: expected stateful=False, got True: .* pass the state": lambda: random_weights(
        keras.layers.GRU(3, stateful=True, name="top")
    ),
    "expected stateful=False": lambda: random_weights(
        keras.layers.Bidirectional(keras.layers.RNN(keras.layers.LSTMCell(3), stateful=True))
    ),
    "merge_mode": lambda: keras.layers.Bidirectional(keras.layers.GRU(3), merge_mode="sum"),
}


@pytest.mark.parametrize("message", REFUSED_OF_KERAS)
def test_a_layer_of_keras_is_refused(message, keras64):
    layer = REFUSED_OF_KERAS[message]()
    if "activation" in message or "cells" in message:
        layer.build((BATCH, TIME, IN))
    with pytest.raises(ValueError, match=f"^layer: .*{message}|^layer: {message}"):
        from_keras(layer)


def test_a_layer_that_the_others_do_not_have_is_refused():
    rngs = nnx.Rngs(0)
    deep, projected = RNN(3, 4, num_layers=2, rngs=rngs), LSTM(3, 4, proj_features=2, rngs=rngs)
    minimal, backwards = MinGRU(3, 4, rngs=rngs), Reversed(GRU(3, 4, rngs=rngs))
    for table, layers in (
        (onnx_table, (deep, projected, backwards)),
        (keras_table, (projected, minimal, Stack([minimal]))),
    ):
        for layer in layers:
            with pytest.raises((TypeError, ValueError), match="layer:"):
                table(layer)
    with pytest.raises(TypeError, match="model:"):
        from_onnx(random_node("GRU", "forward")[0].graph.node[0])
