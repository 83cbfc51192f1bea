"""Weights that do not fit, and the error messages for them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from published import RWKV, build

import torch_ref
from jax_models import (
    GRU,
    LSTM,
    RNN,
    Bidirectional,
    Constant,
    GatedMLP,
    Hawk,
    from_keras,
    from_torch,
    project,
    state_batch_axes,
    to_torch,
)
from jax_models.weights import (
    Weight,
    added,
    batch_norm,
    conv_transpose,
    gates,
    layouts_of,
    linear,
    linear_general,
    linear_of_image,
    loader,
    multi_head_attention,
    nested,
    parts,
    same,
    squeezed,
    stacked,
    summed,
    tied,
    transposed,
    unused,
)
from parity_tests import compare

pytestmark = pytest.mark.usefixtures("x64")


def lstm(**kwargs) -> LSTM:
    return LSTM(5, 6, rngs=nnx.Rngs(0), **kwargs)


def test_all_faults_are_listed_and_the_layer_is_left_alone():
    weights = torch.nn.LSTM(5, 6).state_dict()
    weights["weight_ih_l0"] = weights["weight_ih_l0"].T
    weights["bias_hh_l0"] = weights["bias_hh_l0"].double()
    del weights["weight_hh_l0"]
    weights["extra"] = torch.zeros(1)
    layer = lstm()
    before = jax.tree.map(jnp.copy, nnx.state(layer))
    with pytest.raises(ValueError, match="does not fit LSTM") as error:
        from_torch(layer, weights)
    faults = "weight_ih_l0:", "missing key weight_hh_l0", "bias_hh_l0:", "unexpected key extra"
    assert all(fault in str(error.value) for fault in faults)
    chex.assert_trees_all_equal(nnx.state(layer), before)


def test_a_foreign_module_needs_a_table():
    module, layer = torch.nn.Linear(3, 4), nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="Linear has no layouts"):
        from_torch(layer, module.state_dict())
    table = [transposed("kernel", "weight"), same("bias", "bias")]
    weights = to_torch(from_torch(layer, module.state_dict(), table), table)
    jax.tree.map(np.testing.assert_array_equal, weights, dict(module.state_dict()))
    with pytest.raises(ValueError, match=r"^table: no row for the parameter bias$"):
        to_torch(layer, table[:1])
    with pytest.raises(ValueError, match=r"for the parameter bias; .*draft_table\(twin, model\)"):
        compare(module, layer, np.zeros((2, 3)), weights=table[:1])
    for row, fault in {
        same("scale", "scale"): "Linear has no parameter scale",
        same("bias", "other"): "two rows for the parameter bias",
        same("extra", "bias"): "Linear has no parameter extra; two rows for the key bias",
    }.items():
        with pytest.raises(ValueError, match=rf"^table: {fault}$"):
            to_torch(layer, [*table, row])


ROW = same("a", "b")
LINEAR = {"kernel": np.ones((3, 4)), "bias": np.ones(4)}
FIVE_ROWS = parts(["kernel"], "weight", [5])
attention = partial(multi_head_attention, "attn", "attn", features=8)
REFUSED = [
    ("none of its keys fits LSTM", lambda: from_torch(lstm(), {"kernel": np.zeros(3)})),
    ("state_dict: it has no keys", lambda: from_torch(lstm(), {})),
    ("got LSTM", lambda: from_torch(lstm(), torch.nn.LSTM(5, 6))),
    ("not 'keras'", lambda: to_torch(lstm(), layout="keras")),
    ("not 'scratch'", lambda: to_torch(lstm(num_layers=2), layout="scratch")),
    ("^layout:", lambda: to_torch(lstm(), ["torch.nn"])),
    ("^prefix:", lambda: to_torch(lstm(), prefix=None)),
    ("^prefix: no key", lambda: from_torch(lstm(), {"rnn.cell": np.zeros(3)}, prefix="encoder")),
    ("^layer:", lambda: to_torch(LSTM)),
    ("^layer:", lambda: from_torch(torch.nn.LSTM(5, 6), {})),
    ("^layer:", lambda: to_torch(nnx.eval_shape(lstm))),
    ("^layer:", lambda: jax.jit(lambda parts: to_torch(nnx.merge(*parts)))(nnx.split(lstm()))),
    (
        "no torch module combines the options",
        lambda: to_torch(lstm(proj_features=3, proj_bias=True, num_layers=2)),
    ),
    (
        r"^layout: 'torch.nn.cell' is a single cell .* has bidirectional=True: .*cell_table\(0\)",
        lambda: to_torch(lstm(bidirectional=True), "torch.nn.cell"),
    ),
    ("^index: expected less than the 1 cells, got 1$", lambda: lstm().cell_table(1)),
    ("^index: expected at least 0, got -1$", lambda: lstm().cell_table(-1)),
    ("^index: expected an integer, got '0'$", lambda: lstm().cell_table("0")),
    ("^index: expected an integer, got None$", lambda: lstm().cell_table(None)),
    ("^cell_table: .* has use_peepholes=True", lambda: lstm(use_peepholes=True).cell_table(0)),
    (
        r"^table: expected a list of `Weight` rows, got a dict: choose .* \['torch.nn'\]$",
        lambda: nested(lstm().torch_layouts(), "rnn", "rnn"),
    ),
    ("^table: .*, got a single row: put it into a list$", lambda: nested(same("a", "b"), "", "")),
    ("^table: .*, got a single row", lambda: loader({"a": np.ones(3)}, same("a", "b"))),
    ("^layout: expected a name or .*, got a single row", lambda: to_torch(lstm(), same("a", "b"))),
    ("^table: .*, got a LSTM: its torch_layouts", lambda: nested(lstm(), "rnn", "rnn")),
    (r"^table: .* in it: unpack it, \[\*rows", lambda: nested([linear("a", "b")], "", "")),
    ("^state_dict: expected a mapping", lambda: loader({"a": np.ones(3)}, [ROW])([3])),
    ("^param: .* names around each dot.*got 'layers.0.'$", lambda: linear("layers.0.", "0")),
    ("^key: expected a path such as 'layers.0', got 0$", lambda: nested([ROW], "layers", 0)),
    ("^key: expected a path .*, got \\['weight'\\]$", lambda: same("kernel", ["weight"])),
    ("^param: expected a path .*, got a LSTM$", lambda: linear(lstm(), torch.nn.Linear(3, 4))),
    ("^num_heads: expected a positive integer, got 0$", lambda: attention(num_heads=0)),
    ("^num_heads: expected a divisor of features=8, got 3$", lambda: attention(num_heads=3)),
    (
        "^in_shape: expected a tuple of positive integers, got 3$",
        lambda: linear_general("a", "b", in_shape=3, out_shape=(4,)),
    ),
    ("^shape: expected at least one axis", lambda: linear_of_image("a", "b", shape=())),
    ("^axes: expected a tuple of integers, got 0$", lambda: squeezed("a", "b", 0)),
    ("^params: expected 2 names, got 1$", lambda: summed(("bias",), "bias")),
    ("^keys: expected 2 names, got 3$", lambda: added("bias", ("a", "b", "c"))),
    ("^keys: expected at least one name", lambda: gates("kernel", [])),
    ("^sizes: expected 2, one for each", lambda: parts(["a", "b"], "weight", [5])),
    ("^sizes: expected a positive integer, got 0$", lambda: parts(["a"], "weight", [0])),
    (
        r"^weight: sizes: got \(5,\), but the parameters have \(4,\) rows$",
        lambda: to_torch(nnx.Linear(3, 4, use_bias=False, rngs=nnx.Rngs(0)), [FIVE_ROWS]),
    ),
    ("^bias: expected True or False, got 'no'$", lambda: linear("a", "b", bias="no")),
    ("^affine: expected True or False", lambda: batch_norm("a", "b", affine="no")),
    ("^groups: expected a positive", lambda: conv_transpose("a", "b", groups="2")),
    ("^value: expected an array of numbers", lambda: unused("a", [[1], [2, 3]])),
    ("^linear: paam: no such argument; did you mean param?", lambda: linear(paam="a", key="b")),
    ("^function: expected a function, got an int$", lambda: layouts_of(GatedMLP)(3)),
    ("^params: expected a tree of parameters, got an int$", lambda: project(3)),
    (
        "^table: leave out `params.` in .*: Linear has, .* bias, not params.bias$",
        lambda: to_torch(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), linear("params", "")),
    ),
    (
        "^table: write `params.` before .*: the tree has, .* params.fc.bias, not fc.bias$",
        lambda: loader({"params": {"fc": LINEAR}}, linear("fc", "fc")),
    ),
    ("^layer: expected an nnx.Module, got the class LSTM$", lambda: from_torch(LSTM, {})),
    ("^layer: .*, got the class Hawk$", lambda: state_batch_axes(Hawk)),
    ("^layer: .* Keras, got a LSTM of torch$", lambda: from_keras(torch.nn.LSTM(3, 4))),
    (
        "^layer: .* Keras, got a Bidirectional of jax_models$",
        lambda: from_keras(Bidirectional(lstm(), lstm())),
    ),
]


@pytest.mark.parametrize(("message", "call"), REFUSED)
def test_refuses(message, call):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def in_bias(change) -> dict:
    weights = torch.nn.LSTM(5, 6).state_dict()
    return {**weights, "bias_ih_l0": change(weights["bias_ih_l0"])}


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (torch.zeros(24, dtype=torch.bool), "expected floating numbers, got bool"),
        (torch.zeros(24, dtype=torch.int64), "expected floating numbers, got int64"),
        (torch.zeros(24, dtype=torch.complex64), "expected floating numbers, got complex64"),
        (np.array([None] * 24), "expected floating numbers, got object"),
        (None, "expected a tensor or an array, got NoneType"),
        ([0.0] * 24, "expected a tensor or an array, got list"),
        (torch.zeros(24).to_sparse(), "it cannot be read: .*Sparse layout"),
        (torch.zeros(24, device="meta"), "it cannot be read: .*meta tensor"),
        (torch.zeros(24, dtype=torch.float8_e4m3fn), "8-bit floats are not supported, got float8_"),
        (np.ma.masked_less(np.zeros(24, np.float32), 1), "expected a whole array, got a masked"),
    ],
)
def test_what_is_no_weight(value, fault):
    with pytest.raises(ValueError, match=f"bias_ih_l0: {fault}"):
        from_torch(lstm(param_dtype=jnp.float32), in_bias(lambda _: value))


def test_numbers_that_are_not_finite_are_warned_of():
    weights = torch.nn.LSTM(5, 6).state_dict()
    weights["bias_ih_l0"][3] = torch.nan
    weights["weight_hh_l0"][1, 2] = -torch.inf
    with pytest.warns(UserWarning, match="not finite in weight_hh_l0, bias_ih_l0$") as warned:
        layer = from_torch(lstm(), weights)
    assert len(warned) == 1
    assert warned[0].filename == __file__
    np.testing.assert_array_equal(to_torch(layer)["bias_ih_l0"], weights["bias_ih_l0"].numpy())


SLIPS = {
    "to_jax gives 2 arrays for 1": Weight(("bias",), ("bias",), lambda a: (a, a), lambda a: (a,)),
    "to_torch gives 2 arrays for 1": Weight(("bias",), ("bias",), lambda a: (a,), lambda a: (a, a)),
    "to_torch gives a ndarray, expected a tuple": same("bias", "bias")._replace(
        to_torch=lambda a: a
    ),
    "cannot reshape": same("bias", "bias")._replace(to_torch=lambda a: (a.reshape(3, 9),)),
    r"to_jax gives shape \(1, 4\), the parameter has \(4,\)": same("bias", "bias")._replace(
        to_jax=lambda a: (a[None],)
    ),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_row_whose_transforms_do_not_fit(slip):
    layer = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    table = [transposed("kernel", "weight"), SLIPS[slip]]
    with pytest.raises(ValueError, match=f"bias: {slip}"):
        from_torch(layer, torch.nn.Linear(3, 4).state_dict(), table)


@pytest.mark.parametrize("name", ["separate", "exact"])
def test_a_function_in_the_place_of_a_flag_is_refused(name):
    """The fifth argument was `gradients`, a function."""
    flags = {"separate": True, name: lambda a: (a,)}
    with pytest.raises(TypeError, match=f"{name}: expected True or False, got <function"):
        Weight(("bias",), ("bias",), lambda a: (a,), lambda a: (a,), *flags.values())


def bias_row(**fields) -> Weight:
    """A row for a bias, with some fields replaced."""
    names = {"params": ("bias",), "keys": ("bias",), **fields}
    return Weight(**names, to_jax=lambda a: (a,), to_torch=lambda a: (a,))


ROWS_OF_NAMES = {
    "Weight's params": ("params", lambda names: bias_row(params=names)),
    "Weight's keys": ("keys", lambda names: bias_row(keys=names)),
    "Weight's tied": ("tied", lambda names: bias_row(tied=names)),
    "gates": ("keys", lambda names: gates("kernel", names)),
    "parts": ("params", lambda names: parts(names, "weight")),
    "summed": ("params", lambda names: summed(names, "bias")),
    "added": ("keys", lambda names: added("bias", names)),
    "stacked": ("params", lambda names: stacked(names, "weight")),
    "tied": ("keys", lambda names: tied("embedding", names)),
    "tied's optional": ("optional", lambda names: tied("embedding", ("a",), names)),
}


@pytest.mark.parametrize("row", ROWS_OF_NAMES)
def test_names_of_a_row_are_different_strings_in_a_tuple_or_a_list(row):
    field, build = ROWS_OF_NAMES[row]
    of_list, of_tuple = build(["b", "c"]), build(("b", "c"))
    for name in ("params", "keys", "tied"):
        assert getattr(of_list, name) == getattr(of_tuple, name)
    for names, error, message in (
        ("bc", TypeError, "expected a tuple of names, got 'bc'"),
        ({"b": 1}, TypeError, "expected a tuple of names, got {'b': 1}"),
        (["b", 3], TypeError, "expected names, got 3"),
        ((("b", "c"),), TypeError, r"expected names, got \('b', 'c'\)"),
        (("b", "c", "b"), ValueError, "expected different names, got 'b' 2 times"),
    ):
        with pytest.raises(error, match=f"^{field}: {message}$"):
            build(names)


class Scaled(nnx.Module):
    """A linear layer whose outputs are multiplied by a buffer."""

    def __init__(self, kind: Callable[[jax.Array], Any]):
        self.fc, self.scale = nnx.Linear(3, 4, rngs=nnx.Rngs(0)), kind(jnp.zeros(4))

    def __call__(self, x):
        return self.fc(x) * self.scale[...]


class TorchScaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(3, 4)
        self.register_buffer("scale", torch.rand(4) + 0.5)

    def forward(self, x):
        return self.fc(x) * self.scale


class Buffer(nnx.Variable):
    """A variable of a class of a user's own."""


def both(blocks: list, container: Callable[..., Any]) -> Any:
    """A module that holds these blocks."""
    module = container()
    module.blocks = (torch.nn.ModuleList if container is torch.nn.Module else nnx.List)(blocks)
    return module


@pytest.mark.parametrize(
    ("kind", "name"),
    [(nnx.Variable, "Variable"), (Buffer, "Buffer"), (jnp.asarray, "array"), (np.asarray, "array")],
    ids=["Variable", "subclass", "jax array", "numpy array"],
)
def test_a_buffer_that_no_table_can_name_is_to_be_a_constant(kind, name):
    twin, x = TorchScaled(), np.random.default_rng(0).standard_normal(3)
    table = [*linear("fc", "fc"), same("scale", "scale")]
    what_to_do = (
        f"scale: the {name} of this name is not transferred; make it a jax_models.Constant, or an "
        "nnx.Param if it is trained"
    )
    for rows in (table, table[:-1]):
        message = f"table: Scaled has no parameter {what_to_do}" if rows is table else what_to_do
        with pytest.raises(ValueError, match=message):
            from_torch(Scaled(kind), twin.state_dict(), rows)
        with pytest.raises(ValueError, match=message):
            compare(twin, Scaled(kind), x, weights=rows)
    assert compare(twin, Scaled(Constant), x, weights=table).passed


def test_a_buffer_of_another_shape_or_name_is_no_counterpart():
    twin, model = TorchScaled(), Scaled(nnx.Variable)
    state_dict = twin.state_dict()
    for key, value in (("scale", torch.ones(5)), ("shift", torch.ones(4))):
        weights = {k: v for k, v in state_dict.items() if k != "scale"} | {key: value}
        with pytest.raises(ValueError, match=f"unexpected key {key}$"):
            from_torch(model, weights, linear("fc", "fc"))


def test_buffers_of_several_blocks_share_a_line():
    twin = both([TorchScaled() for _ in range(3)], torch.nn.Module)
    model = both([Scaled(nnx.Variable) for _ in range(3)], nnx.Module)
    table = [row for i in range(3) for row in linear(f"blocks.{i}.fc", f"blocks.{i}.fc")]
    with pytest.raises(ValueError, match=r"\n  unexpected key blocks.{0-2}.scale: the Variable of"):
        from_torch(model, twin.state_dict(), table)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.lstm."])
@pytest.mark.parametrize("given", ["", "model.", "head"])
@pytest.mark.parametrize("entry", [None, "state_dict"])
def test_weights_in_another_place_are_found(prefix, given, entry):
    """The error names the arguments that make the call work."""
    weights = torch.nn.LSTM(5, 6).state_dict()
    found = {"head.weight": torch.zeros(2, 6)} | {prefix + k: value for k, value in weights.items()}
    with pytest.raises(ValueError, match="^prefix:" if given else "^state_dict:") as error:
        from_torch(lstm(), {entry: found, "epoch": 3} if entry else found, prefix=given)
    place = f'state_dict["{entry}"] and prefix="{prefix}"' if entry else f'prefix="{prefix}"'
    assert str(error.value).endswith(f": give {place}")
    assert to_torch(from_torch(lstm(), found, prefix=prefix)).keys() == weights.keys()


CELLS = {"LSTMCell": LSTM, "GRUCell": GRU, "RNNCell": RNN}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_of_torch_nn_is_found_by_its_keys_and_written_back(name, bias):
    cell = getattr(torch.nn, name)(5, 6, bias=bias)
    weights = {f"decoder.cell.{key}": value for key, value in cell.state_dict().items()}
    layer = CELLS[name](5, 6, use_bias=bias, rngs=nnx.Rngs(0))
    layer = from_torch(layer, weights | {"head.weight": torch.ones(2, 6)}, prefix="decoder.cell")
    back = to_torch(layer, "torch.nn.cell", prefix="decoder.cell")
    assert back.keys() == weights.keys()
    jax.tree.map(np.testing.assert_array_equal, back, weights)


def test_two_cells_are_the_directions_of_one_layer():
    cells = torch.nn.ModuleDict({name: torch.nn.GRUCell(5, 6) for name in ("there", "back")})
    layer = GRU(5, 6, bidirectional=True, rngs=nnx.Rngs(0))
    table = [*nested(layer.cell_table(0), "", "there"), *nested(layer.cell_table(1), "", "back")]
    layer = from_torch(layer, cells.state_dict(), table)
    in_layer = to_torch(layer)
    for name, array in cells["back"].state_dict().items():
        np.testing.assert_array_equal(in_layer[f"{name}_l0_reverse"], array)


@pytest.mark.parametrize(
    ("layer", "options", "found"),
    [
        (LSTM, {"num_layers": 2, "bidirectional": True}, "num_layers=2, bidirectional=True"),
        (LSTM, {"proj_features": 3}, "proj_features=3"),
        (LSTM, {"use_peepholes": True}, "use_peepholes=True"),
        (RNN, {"recurrent_bias": False}, "recurrent_bias=False"),
        (GRU, {"reset_after": False}, "reset_after=False"),
    ],
)
def test_a_layer_that_is_no_cell_refuses_one(layer, options, found):
    weights = getattr(torch.nn, f"{layer.__name__}Cell")(5, 6).state_dict()
    message = rf"^state_dict: a cell of torch.nn \(.*\), but this {layer.__name__} has {found}: .*$"
    with pytest.raises(ValueError, match=message):
        from_torch(layer(5, 6, **options, rngs=nnx.Rngs(0)), weights)


def under(*prefixes: str, features: int = 5) -> dict:
    weights = torch.nn.LSTM(features, 6).state_dict()
    return {prefix + key: value for prefix in prefixes for key, value in weights.items()}


TWO = r'under "encoder\.", "decoder\.": give prefix="encoder\." or prefix="decoder\."$'


@pytest.mark.parametrize(
    ("place", "state_dict"),
    [
        (r'give state_dict\["model"\]$', {"model": under(""), "optimizer": {"state": {}}}),
        (r'give state_dict\["b"\]$', {"a": under("", features=7), "b": under("")}),
        (TWO, under("encoder.", "decoder.")),
        (TWO, under("a.", features=7) | under("encoder.", "decoder.")),
        (
            r'"layers\.{0-5}\.": give prefix="layers\.0\."',
            under(*(f"layers.{i}." for i in range(6))),
        ),
        (r'"a\.", but their shapes do not fit: a\.weight_ih_l0: ', under("a.", features=7)),
    ],
)
def test_weights_in_an_entry_and_in_several_places(place, state_dict):
    with pytest.raises(ValueError, match=place):
        from_torch(lstm(), state_dict)


@pytest.mark.parametrize("prefix", ["encoder.lstm.", "encoder.lstm"])
def test_a_layer_of_a_larger_model_is_loaded_and_put_back(prefix):
    def model() -> torch.nn.Module:
        encoder = {"lstm": torch.nn.LSTM(5, 6), "lstm_head": torch.nn.LSTM(5, 6)}
        return torch.nn.ModuleDict({"encoder": torch.nn.ModuleDict(encoder)})

    original, others = model().state_dict(), model()
    weights = to_torch(from_torch(lstm(), original, prefix=prefix), prefix=prefix)
    assert weights.keys() == {key for key in original if key.startswith("encoder.lstm.")}
    whole = {**others.state_dict(), **{k: torch.from_numpy(a) for k, a in weights.items()}}
    others.load_state_dict(whole)
    for key, number in others.state_dict().items():
        assert torch.equal(number, original[key]) == (key in weights)


def test_an_error_of_many_keys_can_be_read():
    """Keys that differ only in one number share a line."""
    larger, smaller = (build(replace(RWKV, num_layers=n)) for n in (12, 10))
    weights = to_torch(smaller)
    del weights["blocks.3.ln1.bias"]
    with pytest.raises(ValueError, match=r"missing key blocks\.\{3,10-11\}\.ln1\.bias") as error:
        from_torch(larger, weights)
    assert len(str(error.value).splitlines()) < 25


def test_weights_of_a_narrower_dtype_are_widened_exactly():
    module = torch.nn.GRU(5, 6).bfloat16()
    layer = from_torch(GRU(5, 6, rngs=nnx.Rngs(0)), module.state_dict())
    weights = to_torch(layer)
    for key, tensor in module.state_dict().items():
        assert weights[key].dtype == np.float32
        np.testing.assert_array_equal(weights[key], tensor.float().numpy())


def test_one_bias_goes_into_two_and_their_sum_comes_back():
    twin = torch_ref.RNN(5, 6)
    with torch.no_grad():
        twin.b.normal_()
        twin.b[0], twin.b[1] = 0.0, -0.0
    layer = from_torch(RNN(5, 6, rngs=nnx.Rngs(0)), twin.state_dict())
    assert to_torch(layer, "cell")["b"].tobytes() == twin.b.detach().numpy().tobytes()
    cell = layer.cells[0]
    cell.bias_hh[...] = jnp.full(6, 0.25)
    np.testing.assert_array_equal(to_torch(layer, "cell")["b"], twin.b.detach().numpy() + 0.25)


def test_neither_side_shares_memory():
    module = torch.nn.RNN(5, 6)
    layer = from_torch(RNN(5, 6, rngs=nnx.Rngs(0)), module.state_dict())
    before = to_torch(layer)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    for array in before.values():
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert array.any()
        array[...] = 0
    assert all(array.any() for array in to_torch(layer).values())
