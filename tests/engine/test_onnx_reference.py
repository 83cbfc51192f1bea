"""A model of ONNX as the reference of `compare`, alone and in a record."""

import io
import math
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax import lax

from jax_models import from_onnx, onnx_table
from parity_tests import compare, record
from parity_tests.engine.source import asked_for, opened

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, numpy_helper  # noqa: E402
from onnx.helper import (  # noqa: E402
    make_graph,
    make_model,
    make_node,
    make_opsetid,
    make_tensor_value_info,
)

from parity_tests.engine.onnx_evaluator import InFloat64, RefusedError, evaluator  # noqa: E402

pytestmark = pytest.mark.usefixtures("standard_promotion")

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 5, 4))
FLOAT = TensorProto.FLOAT


def value(name, shape=None, dtype=FLOAT):
    return make_tensor_value_info(name, dtype, shape)


def graph_of(nodes, inputs, outputs, weights=None, opset=20, functions=()):
    """A model; `inputs` and `outputs` are names, or what `value` gives."""
    held = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    given = [[v if not isinstance(v, str) else value(v) for v in vs] for vs in (inputs, outputs)]
    opsets = [make_opsetid("", opset), *(make_opsetid(f.domain, 1) for f in functions)]
    graph = make_graph(nodes, "graph", *given, held)
    return make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)


def drawn(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def exported(module, *inputs):
    """What torch writes of a module."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module.eval(), inputs, file, dynamo=False, opset_version=17)
    return onnx.load_from_string(file.getvalue())


class TorchMLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(4, 8), torch.nn.LayerNorm(8)
        self.last = torch.nn.Linear(8, 3)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter)

    def forward(self, x):
        return self.last(torch.nn.functional.gelu(self.norm(self.first(x))))


def mlp(fault):
    """Torch's, with LayerNorm and GELU: the products' kernels have names of the exporter's."""

    def model(weights, x):
        kernels = [weights[key] for key in weights if "MatMul" in key]
        h = x @ kernels[0] + weights["first.bias"]
        h = h - h.mean(-1, keepdims=True)
        epsilon = 1.1e-5 if fault == "epsilon" else 1e-5
        h = h / jnp.sqrt((h * h).mean(-1, keepdims=True) + epsilon)
        h = h * weights["norm.weight"] + weights["norm.bias"]
        h = jax.nn.gelu(h, approximate=fault == "form")
        return h @ kernels[1] + weights["last.bias"] * (1 + 1e-6 * (fault == "weight"))

    return exported(TorchMLP(), torch.randn(2, 5, 4)), model, (X,), {"weights": dict}


def conv(fault, opset=13):
    """Before opset 14, where onnx's evaluator would take the batch's own statistics."""
    weights = {
        "kernel": drawn(6, 3, 3, 3),
        "scale": drawn(6),
        "bias": drawn(6),
        "mean": drawn(6),
        "var": np.abs(drawn(6)) + 0.1,
    }
    nodes = [
        make_node("Conv", ["x", "kernel"], ["c"], pads=[1, 1, 1, 1], strides=[2, 2]),
        make_node("BatchNormalization", ["c", "scale", "bias", "mean", "var"], ["n"]),
        make_node("LeakyRelu", ["n"], ["y"], alpha=0.1),
    ]

    def model(weights, x):
        kernel = jnp.flip(weights["kernel"], -1) if fault == "weight" else weights["kernel"]
        y = lax.conv_general_dilated(x, kernel, (2, 2), [(1, 1), (1, 1)])
        scale, bias, mean, var = (
            weights[key][:, None, None] for key in ("scale", "bias", "mean", "var")
        )
        epsilon = 1.1e-5 if fault == "epsilon" else 1e-5
        y = (y - mean) / jnp.sqrt(var + epsilon) * scale + bias
        return jax.nn.leaky_relu(y, 0.01 if fault == "form" else 0.1)

    x = RNG.standard_normal((2, 3, 8, 8))
    return graph_of(nodes, ["x"], ["y"], weights, opset), model, (x,), {"weights": dict}


class Holder(nnx.Module):
    """A module without a table of its own."""

    def __init__(self, layer):
        self.layer = layer


def lstm(fault):
    """The layer that `from_onnx` makes, with the weights in its own table."""
    weights = {"W": drawn(2, 24, 4), "R": drawn(2, 24, 6), "B": drawn(2, 48)}
    node = make_node(
        "LSTM", ["x", *weights], ["y", "h", "c"], hidden_size=6, direction="bidirectional"
    )
    model = graph_of([node], ["x"], ["y", "h", "c"], weights)
    layer = from_onnx(model)
    options = {"weights": onnx_table(layer)}
    if fault == "weight":
        bias = layer.cells[0].bias_ih
        bias.set_value(bias.get_value().at[0].add(1e-4))
        layer, options = Holder(layer), {}

    def call(layer, x):
        layer = layer.layer if fault == "weight" else layer
        y, state = layer(jnp.flip(x, 1) if fault == "form" else x)
        y = y.reshape(*y.shape[:2], 2, 6).swapaxes(1, 2)
        return y * (1 + 1e-10 * (fault == "epsilon")), state

    return model, layer, (X,), {"call": call, **options}


def scan(fault):
    """A decayed sum along the first axis, whose decay the body has from outside."""
    body = make_graph(
        [
            make_node("Mul", ["h", "decay"], ["kept"]),
            make_node("Constant", [], ["third"], value_float=1 / 3),
            make_node("Mul", ["x_t", "third"], ["added"]),
            make_node("Add", ["kept", "added"], ["h_next"]),
            make_node("Identity", ["h_next"], ["y_t"]),
        ],
        "step",
        [value("h"), value("x_t")],
        [value("h_next"), value("y_t")],
    )
    nodes = [make_node("Scan", ["h0", "x"], ["last", "y"], body=body, num_scan_inputs=1)]
    weights = {"decay": np.abs(drawn(5, 4)), "h0": drawn(5, 4)}

    def model(weights, x):
        decay = weights["decay"] * (1 + 1e-10 * (fault == "weight"))
        third = 0.33333 if fault == "epsilon" else 1 / 3

        def step(h, x):
            h = decay * h + third * x
            return h, x if fault == "form" else h

        last, y = lax.scan(step, weights["h0"], x)
        return {"y": y, "last": last}

    return graph_of(nodes, ["x"], ["last", "y"], weights), model, (X,), {"weights": dict}


def loop(fault):
    """Doubles x until its norm is 100, then halves it if a number is above zero."""
    body = make_graph(
        [
            make_node("Mul", ["h", "two"], ["h_next"]),
            make_node("ReduceL2", ["h_next"], ["norm"], keepdims=0),
            make_node("Less", ["norm", "hundred"], ["goes_on"]),
            make_node("Identity", ["h_next"], ["seen"]),
        ],
        "body",
        [value("i", [], TensorProto.INT64), value("c", [], TensorProto.BOOL), value("h")],
        [value("goes_on", [], TensorProto.BOOL), value("h_next"), value("seen")],
    )
    half, same = (
        make_graph([make_node(*node)], name, [], [value(name)])
        for name, node in {
            "half": ("Div", ["h", "two"], ["half"]),
            "same": ("Identity", ["h"], ["same"]),
        }.items()
    )
    nodes = [
        make_node("Loop", ["", "", "x"], ["h", "seen"], body=body),
        make_node("ReduceMax", ["x"], ["most"], keepdims=0),
        make_node("Greater", ["most", "zero"], ["is_above"]),
        make_node("If", ["is_above"], ["y"], then_branch=half, else_branch=same),
    ]
    scalars = {"two": np.float32(2), "hundred": np.float32(100), "zero": np.float32(0)}
    weights = {name: np.asarray(number) for name, number in scalars.items()}
    factor = {"weight": 2 + 1e-9, "epsilon": 2 + 1e-6}.get(fault, 2)

    def model(x):
        seen, h = [], x
        for _ in range(math.ceil(math.log2(100 / np.linalg.norm(X)))):
            h = factor * h
            seen.append(h)
        return {"y": h if fault == "form" else h / 2, "seen": jnp.stack(seen)}

    return graph_of(nodes, ["x"], ["y", "seen"], weights), model, (X,), {"weights": None}


PAIRS = (mlp, conv, lstm, scan, loop)


def as_function(pair):
    """A function of inputs alone is one of weights that it does not read."""
    model, port, inputs, options = pair
    if options.get("weights", dict) is None:
        return model, lambda _, *xs: port(*xs), inputs, {"weights": dict}
    return pair


@pytest.mark.parametrize("fault", [None, "epsilon", "form", "weight"])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_model_is_a_reference_alone_and_recorded(pair, fault, tmp_path):
    model, port, inputs, options = as_function(pair(fault))
    live = compare(model, port, *inputs, **options)
    assert live.passed == (fault is None), str(live)
    assert "gradients are not compared: ONNX has none" in live.notes
    assert {*live.errors["float64"]} == {*live.errors["float32"]} == {"outputs"}
    assert str(live).split()[:2] == ["ONNX", "JAX"]
    record(model, *inputs, path=tmp_path / "model.safetensors")
    stored = compare(tmp_path / "model.safetensors", port, **options)
    assert stored.passed == live.passed, str(stored)
    if fault is None:
        bounds = [error.bound for error in live.tensors["float64"]["outputs"].values()]
        assert max(bounds) <= (1e-10 if pair is scan else 1e-12), str(live)


def test_a_port_with_its_own_weights_needs_none():
    model, layer, inputs, options = lstm(None)
    report = compare(model, Holder(layer), *inputs, call=lambda m, x: options["call"](m.layer, x))
    assert report.passed, str(report)


def scatter_of(twin, *inputs, dtype="float32"):
    """The scatter of a side that is rounded at random, and its oracle."""
    asked = asked_for(inputs, None, ("float64", "float32"), 0, None)
    with jax.enable_x64(True), opened(twin) as source:
        problem = source.start(asked, False)(build=dict, call=None, to_torch=None)
        reference = source.reference(problem, lambda text: None)
        return reference.scatter(dtype)["outputs"], reference.oracle["outputs"]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_scatter_is_that_of_torch(dtype):
    module = TorchMLP().eval()
    (ours,) = scatter_of(exported(module, torch.randn(2, 5, 4)), X, dtype=dtype)[0].values()
    (theirs,) = scatter_of(module, X, dtype=dtype)[0].values()
    assert theirs / 4 < ours < 4 * theirs


def test_the_scatter_of_a_recurrent_operator_knows_its_conditioning():
    """An LSTM rounds within: its weights count as off by so much."""
    node = make_node("LSTM", ["x", "W", "R"], ["y"], hidden_size=6)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 1, 4))
    shapes, errors = {"W": (1, 24, 4), "R": (1, 24, 6)}, []
    numbers = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    for size in (0.1, 16):
        weights = {name: np.float32(size * array) for name, array in numbers.items()}
        (error,) = scatter_of(graph_of([node], ["x"], ["y"], weights), x)[0].values()
        errors.append(error)
    assert errors[0] < 16 * np.finfo(np.float32).eps
    assert errors[1] > 30 * errors[0]


def test_rounding_does_not_decide():
    """Is 0.1 · x above 0.1 · x? Rounding would say so of half of the numbers."""
    nodes = [
        make_node("Mul", ["x", "a"], ["one"]),
        make_node("Mul", ["a", "x"], ["other"]),
        make_node("Greater", ["one", "other"], ["is_above"]),
        make_node("Where", ["is_above", "x", "one"], ["y"]),
    ]
    model = graph_of(nodes, ["x"], ["y"], {"a": np.asarray(np.float32(0.1))})
    (error,), _ = (tree.values() for tree in scatter_of(model, X))
    assert 1e-8 < error < 1e-6
    assert compare(model, lambda w, x: w["a"] * x, X, weights=dict).passed


MIXED = graph_of(
    [
        make_node("Gather", ["table", "ids"], ["rows"]),
        make_node("Where", ["mask", "rows", "x"], ["y"]),
        make_node("ArgMax", ["x"], ["most"], axis=-1, keepdims=0),
        make_node("Not", ["mask"], ["hidden"]),
    ],
    [value("ids", dtype=TensorProto.INT64), value("mask", dtype=TensorProto.BOOL), "x"],
    ["y", value("most", dtype=TensorProto.INT64), value("hidden", dtype=TensorProto.BOOL)],
    {"table": drawn(7, 4)},
)
IDS, MASK = RNG.integers(0, 7, (2, 5)), RNG.random((2, 5, 1)) > 0.5


def mixed(weights, ids, mask, x, fault=None):
    return (
        jnp.where(mask, weights["table"][ids + (fault == "ids")], x),
        jnp.argmax(x, -1) + (fault == "most"),
        mask if fault == "hidden" else ~mask,
    )


@pytest.mark.parametrize("by_name", [(), ("x",), ("mask", "ids")])
@pytest.mark.parametrize("fault", [None, "ids", "most", "hidden"])
def test_integers_masks_and_names(by_name, fault):
    named = {"ids": IDS.astype(np.int32), "mask": MASK, "x": X}
    inputs = [x for name, x in named.items() if name not in by_name]
    names = [name for name in named if name not in by_name]

    def model(weights, *xs, **kwargs):
        return mixed(weights, **dict(zip(names, xs, strict=True)), **kwargs, fault=fault)

    report = compare(MIXED, model, *inputs, weights=dict, kwargs={n: named[n] for n in by_name})
    assert report.passed == (fault is None), str(report)


def test_what_is_compared_is_chosen_by_call_twin(tmp_path):
    options = {"call_twin": lambda model, *inputs: model(*inputs)["y"]}
    port = lambda *inputs: mixed(*inputs)[0]  # noqa: E731
    assert compare(MIXED, port, IDS, MASK, X, weights=dict, **options).passed
    onnx.save(MIXED, tmp_path / "mixed.onnx")
    record(tmp_path / "mixed.onnx", IDS, MASK, X, path=tmp_path / "mixed.safetensors", **options)
    assert compare(str(tmp_path / "mixed.safetensors"), port, weights=dict).passed


def test_numbers_of_half_precision_are_widened():
    """The weights are float16's, and float64 is compared without the casts to it."""
    nodes = [
        make_node("Cast", ["x"], ["half"], to=TensorProto.FLOAT16),
        make_node("MatMul", ["half", "w"], ["product"]),
        make_node("Cast", ["product"], ["y"], to=FLOAT),
    ]
    model = graph_of(nodes, ["x"], ["y"], {"w": drawn(4, 3, dtype=np.float16)})
    for factor in (1, 1 + 1e-10):
        report = compare(model, lambda w, x, f=factor: f * x @ w["w"], X, weights=dict)
        assert report.passed == (factor == 1), str(report)
        assert "ONNX casts to float16: float64 is compared without these casts" in report.notes

    def casting(weights, x):
        product = x.astype(jnp.float16) @ weights["w"].astype(jnp.float16)
        return product.astype(jnp.float32)

    report = compare(model, casting, X, weights=dict)
    assert report.passed, str(report)


def test_functions_and_their_attributes():
    """Of the model, and of an operator that ONNX defines by others."""
    scaled = onnx.helper.make_function(
        "own",
        "Scaled",
        ["x"],
        ["y"],
        [make_node("Constant", [], ["by"]), make_node("Mul", ["x", "by"], ["y"])],
        [make_opsetid("", 20)],
        ["factor"],
    )
    reference = scaled.node[0].attribute.add()
    reference.name, reference.ref_attr_name = "value_float", "factor"
    reference.type = onnx.AttributeProto.FLOAT
    nodes = [
        make_node("Scaled", ["x"], ["s"], domain="own", factor=0.1),
        make_node("Gelu", ["s"], ["g"]),
        make_node("MeanVarianceNormalization", ["g"], ["y"], axes=[0, 1]),
    ]
    model = graph_of(nodes, ["x"], ["y"], functions=[scaled])
    for factor in (0.1, 0.1 + 1e-10):

        def port(x, factor=factor):
            h = jax.nn.gelu(factor * x, approximate=False)
            deviation = jnp.sqrt((h * h).mean((0, 1)) - h.mean((0, 1)) ** 2)
            return (h - h.mean((0, 1))) / (deviation + 1e-9)

        report = compare(model, port, X)
        assert report.passed == (factor == 0.1), str(report)


def drawing(node):
    return graph_of([node, make_node("Add", ["x", "n"], ["y"])], ["x"], ["y"])


def of_node(op_type, names, opset=20, **attributes):
    weights = {"W": drawn(1, 24, 4), "R": drawn(1, 24, 6), "lens": np.array([2, 1, 2, 2, 2], "i4")}
    weights |= {"grid": drawn(2, 3, 3, 2), "frames": drawn(2, 1, 5, 4)}
    node = make_node(op_type, names, ["y"], **attributes)
    return graph_of([node], ["x"], ["y"], weights, opset)


RECURRENT = {"names": ["x", "W", "R"], "hidden_size": 6}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (of_node("LSTM", **RECURRENT, clip=1.0), "LSTM y: onnx's evaluator ignores its clip"),
        (of_node("LSTM", **RECURRENT, activations=["Relu"] * 3), "ignores its activations Relu"),
        (
            of_node("LSTM", ["x", "W", "R", "", "lens"], hidden_size=6),
            "ignores its sequence_lens",
        ),
        (of_node("GridSample", ["frames", "grid"]), "GridSample y computes in float32 whatever"),
        (of_node("Unheard", ["x"]), "onnx's evaluator cannot run the model: No registered"),
        (of_node("MatMul", ["x", "W"]), "twin: MatMul y: Unable to multiply shapes"),
        (
            drawing(make_node("RandomNormalLike", ["x"], ["n"])),
            "the results are random, by RandomNormalLike",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(model, message, tmp_path):
    with pytest.raises(ValueError, match=message) as refused:
        record(model, X, path=tmp_path / "model.safetensors")
    assert "\n" not in str(refused.value)
    assert not [*tmp_path.iterdir()]


def test_arguments_that_do_not_fit(tmp_path, monkeypatch):
    model, port, inputs, options = mlp(None)
    with pytest.raises(ValueError, match="dtypes: an ONNX model runs in float64 and float32, got"):
        compare(model, port, *inputs, dtypes=["bfloat16"], **options)
    with pytest.raises(ValueError, match=r"inputs: the ONNX model has .*, got 2$"):
        compare(model, port, *inputs, *inputs, **options)
    with pytest.raises(TypeError, match=r"inputs: .*: the ONNX model expects float32, got int64"):
        compare(model, port, np.ones((2, 5, 4), int), **options)
    with pytest.raises(ValueError, match=r"^locate: a model of ONNX has no submodules"):
        compare(model, port, *inputs, locate=True, **options)
    (tmp_path / "bad.onnx").write_text("no model")
    with pytest.raises(ValueError, match=r"bad\.onnx is no model of ONNX"):
        compare(tmp_path / "bad.onnx", port, *inputs, **options)
    for name in [name for name in sys.modules if name.startswith("parity_tests.engine.onnx_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match="twin: an ONNX model needs the package onnx: pip"):
        compare(tmp_path / "model.onnx", port, *inputs, **options)


def test_a_weight_that_is_forgotten_fails():
    """A constant need not be read, a weight must be; one that nothing needs may be left."""
    model, port, inputs, _ = mlp(None)
    held = numpy_helper.from_array(drawn(3), "idle")
    model.graph.initializer.append(held)
    bias = next(i for i in model.graph.initializer if i.name == "norm.bias")
    bias.CopyFrom(numpy_helper.from_array(np.zeros(8, np.float32), "norm.bias"))
    used = [i.name for i in model.graph.initializer if i.name not in ("idle", "norm.bias")]

    def forgetting(arrays):
        return {name: arrays[name] for name in used} | {"norm.bias": 0.0}

    report = compare(model, port, *inputs, weights=forgetting)
    assert report.faults == ("weights: the loader does not read norm.bias",), str(report)
    used.append("norm.bias")
    assert compare(model, port, *inputs, weights=forgetting).passed


ROUGH = ("acosh", "bernoulli", "dynamicquant", "softmax_large", "tree_ensemble")
"""Random, or ill-conditioned at the inputs of onnx's tests."""


def is_of_float32(x):
    return getattr(x, "dtype", None) == np.float32


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Setting the shape on a NumPy array:DeprecationWarning")
def test_operators_run_in_float64_as_onnx_defines_them():
    """By onnx's own tests: the results are theirs, and smooth far below float32's rounding."""
    from onnx.backend.test.case.node import collect_testcases

    checked, rng = 0, np.random.default_rng(0)
    with np.errstate(all="ignore"):
        cases = [case for case in collect_testcases(None) if case.model and case.data_sets]
    for case in cases:
        given, expected = case.data_sets[0]
        if not any(map(is_of_float32, given)) or any(part in case.name for part in ROUGH):
            continue
        directions = [rng.uniform(-1, 1, x.shape) if is_of_float32(x) else 0 for x in given]
        try:
            runs = []
            for step in (0, 1e-9, 2e-9):
                moved = [
                    np.float64(x) * (1 + step * direction) if is_of_float32(x) else x
                    for x, direction in zip(given, directions, strict=True)
                ]
                names = [declared.name for declared in case.model.graph.input]
                feeds = dict(zip(names, moved, strict=False))
                runs.append(evaluator(case.model, InFloat64()).run(None, feeds))
        except RefusedError:
            continue
        for like, y, *others in zip(expected, *runs, strict=True):
            if is_of_float32(like) and all(y.shape == other.shape for other in others):
                assert y.dtype == np.float64, case.name
                np.testing.assert_allclose(y, like, 1e-3, 1e-4, err_msg=case.name)
                one, two = (np.where(np.isfinite(y), other, 0) for other in others)
                y = np.where(np.isfinite(y), y, 0)
                bent = abs(y - 2 * one + two) / (abs(y).max(initial=0) or 1)
                assert np.all((bent <= 1e-11) | (bent > 1e-5)), case.name  # or else it jumps
        checked += 1
    assert checked > 1000
