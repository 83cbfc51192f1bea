"""`compare` on pairs of models that are not in this project."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx

from jax_models import LSTM
from jax_models.weights import Weight, batch_norm, conv, linear, transposed
from parity_tests import assert_parity, compare, record
from parity_tests.engine.bounds.tolerance import rms


class TorchCNN(torch.nn.Module):
    """A CNN for images (batch, channel, height, width)."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.head = torch.nn.Linear(8, 5)
        self.drop = torch.nn.Dropout(0.5)
        for tensor in (self.norm.running_mean, self.norm.running_var, *self.norm.parameters()):
            torch.nn.init.uniform_(tensor, 0.5, 1.5)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        return self.head(self.drop(x.mean((2, 3))))


class CNN(nnx.Module):
    """A CNN for images (batch, height, width, channel)."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 5, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(jnp.transpose(x, (0, 2, 3, 1)))))
        return self.head(self.drop(x.mean((1, 2))))


CNN_WEIGHTS = [*conv("conv", "conv"), *batch_norm("norm", "norm"), *linear("head", "head")]
pytestmark = pytest.mark.usefixtures("standard_promotion")


def images() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((2, 3, 7, 6)).astype(np.float32)


def twin(build, *args, **kwargs) -> torch.nn.Module:
    torch.manual_seed(0)
    return build(*args, **kwargs)


def test_a_convolutional_network_agrees():
    model = CNN(nnx.Rngs(0))
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]
    report = compare(twin(TorchCNN), model, images(), weights=CNN_WEIGHTS)
    assert report.passed, f"\n{report}"
    assert not report.notes
    for dtype in ("float64", "float32"):
        assert report.errors[dtype].keys() == {"outputs", "input gradient", "weight gradients"}
    after = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]
    assert all((a == b).all() for a, b in zip(before, after, strict=True)), "the model was changed"


def test_each_tensor_has_its_error():
    model = CNN(nnx.Rngs(0))
    model.norm.epsilon = 2e-5
    report = compare(twin(TorchCNN), model, images(), weights=CNN_WEIGHTS)
    named = report.tensors["float64"]["weight gradients"]
    assert named.keys() == dict(TorchCNN().named_parameters()).keys()
    assert {name for name, error in named.items() if error.passed} == {"norm.bias", "head.bias"}
    _, *rows = report.table(3).splitlines()
    assert len(rows) == 3
    assert float(rows[0].split()[-2]) >= float(rows[1].split()[-2]) > 1e3


@pytest.mark.parametrize("reference", ["a module", "a record"])
def test_arrays_of_both_sides_are_kept_on_request(reference, tmp_path):
    module, inputs = twin(TorchCNN), [images()]
    if reference == "a record":
        record(module, *inputs, path=tmp_path / "cnn.safetensors", activations=False)
        module, inputs = tmp_path / "cnn.safetensors", []
    compared = partial(compare, module, CNN(nnx.Rngs(0)), *inputs, weights=CNN_WEIGHTS)
    report, plain = compared(arrays=True), compared()
    assert report.tensors == plain.tensors
    for dtype, groups in report.tensors.items():
        for group, named in groups.items():
            for name, error in named.items():
                exact = report.tensors["float64"][group][name].torch_array
                difference = rms(error.jax_array.astype(np.float64) - exact) / rms(exact)
                assert error.jax == pytest.approx(difference)
                assert error.jax_array.dtype == dtype
                is_known = reference == "a module" or dtype == "float64"
                assert (error.torch_array is not None) == is_known
                assert not is_known or error.torch_array.dtype == dtype
                held = plain.tensors[dtype][group][name]
                assert held.torch_array is held.jax_array is None


def test_channels_that_are_elsewhere_are_named():
    """A model for images (N, H, W, C) gets torch's images, (N, C, H, W)."""
    table = conv("", "")
    module, model = torch.nn.Conv2d(3, 8, 3, padding=1), nnx.Conv(3, 8, (3, 3), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="feature dimension") as found:
        compare(module, model, images(), weights=table)
    note = found.value.__notes__[-1]
    assert "(2, 3, 7, 6) looks like (N, C, H, W), and the JAX model takes (N, H, W, C)" in note
    call = eval(note.partition("call=")[2], {"jnp": jnp})  # the proposed call works
    assert compare(module, model, images(), weights=table, call=call).passed
    half = compare(
        module, model, images(), weights=table, call=lambda m, x: m(jnp.moveaxis(x, 1, -1))
    )
    (fault,) = half.faults
    assert "(2, 8, 7, 6) in torch, (2, 7, 6, 8) in JAX, as (N, C, H, W) and (N, H, W, C)" in fault
    with pytest.raises(ValueError, match="feature dimension") as found:
        compare(module, nnx.Conv(5, 8, (3, 3), rngs=nnx.Rngs(0)), images())
    assert not any("looks like" in note for note in found.value.__notes__)


def test_the_message_has_what_fails_and_where_it_begins():
    model = CNN(nnx.Rngs(0))
    model.norm.epsilon = 1.0001e-5
    with pytest.raises(AssertionError) as found:
        assert_parity(twin(TorchCNN), model, images(), weights=CNN_WEIGHTS)
    message = str(found.value)
    assert message.startswith("the two sides differ\n")
    assert "BatchNorm2d | BatchNorm: eps 1e-05 | epsilon 1.0001e-05" in message
    assert message.count("FAIL, worst in ") == 3, "float32 passes"
    assert message.endswith("first to depart: norm, forward")
    model = CNN(nnx.Rngs(0))
    call = lambda model, x: model(x)[:1]  # noqa: E731
    with pytest.raises(AssertionError) as found:
        assert_parity(twin(TorchCNN), model, images(), weights=CNN_WEIGHTS, locate=False, call=call)
    shape = "FAIL: outputs, y: shape (2, 5) in torch, (1, 5) in JAX"
    assert str(found.value) == f"the two sides differ\n{shape}"


def test_grucell_of_flax_cannot_hold_the_recurrent_bias():
    """Torch multiplies the last third of this bias by the reset gate."""
    rng = np.random.default_rng(0)
    biases = ("bias_ih", "bias_hh")
    report = compare(
        twin(torch.nn.GRUCell, 3, 4),
        nnx.GRUCell(3, 4, rngs=nnx.Rngs(0)),
        rng.standard_normal((2, 3)),
        rng.standard_normal((2, 4)),
        weights=[
            transposed("dense_i.kernel", "weight_ih"),
            transposed("dense_h.kernel", "weight_hh"),
            Weight(("dense_i.bias",), biases, lambda a, b: (a + b,), lambda a: (a, 0 * a)),
        ],
        call=lambda cell, x, h: cell(h, x)[0],
    )
    assert "weights: bias_hh comes back changed: the JAX module cannot hold it" in report.faults
    assert ("float64", "outputs") in [failure[:2] for failure in report.failures]


def linear_function(weights, x):
    return x @ weights["kernel"] + weights["bias"]


LOADERS = {
    "jax": lambda w: {"kernel": w["weight"].T, "bias": w["bias"]},
    "numpy": lambda w: {"kernel": np.ascontiguousarray(w["weight"].T), "bias": w["bias"]},
    "torch": lambda w: {"kernel": torch.tensor(w["weight"]).T, "bias": w["bias"].tolist()},
}


@pytest.mark.parametrize("library", LOADERS)
def test_a_function_and_a_loader(library):
    """Only JAX's gradients pass through a loader, and the report says so."""
    report = compare(
        twin(torch.nn.Linear, 3, 4), linear_function, np.ones((2, 3)), weights=LOADERS[library]
    )
    assert report.passed, f"\n{report}"
    compared = "weight gradients" in report.errors["float64"]
    noted = any(note.startswith("weight gradients are not compared") for note in report.notes)
    assert (compared, noted) == (library == "jax", library != "jax")


SAME = "return the same structure from both, with `call` and `call_twin`"
FAULTS = {
    f"results: torch returns y and JAX returns (y, state): {SAME}": (
        lambda x: x,
        lambda x: (x.astype(jnp.bfloat16), x),
    ),
    f"results: torch returns (y, state) and JAX returns y: {SAME}": (
        lambda x: (x, x),
        lambda x: x,
    ),
    "outputs: all of them are empty, there is nothing to compare": (
        lambda x: x[:0],
        lambda x: x[:0],
    ),
    "outputs, y: float64 in torch, int32 in JAX": (lambda x: x, lambda x: x.astype(jnp.int32)),
    "outputs, y: 2 of 2 int64 differ": (lambda x: x.argmax(1), lambda x: x.argmin(1)),
    "outputs, y: 6 of 6 numbers of the float64 torch side are not finite": (
        lambda x: x * torch.nan,
        lambda x: x * jnp.nan,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_no_error_can_say(fault):
    of_torch, of_jax = FAULTS[fault]
    report = compare(
        torch.nn.Identity(),
        lambda _, x: of_jax(x),
        np.arange(6.0).reshape(2, 3),
        weights=lambda weights: dict(weights),
        call_twin=lambda twin, x: of_torch(twin(x)),
    )
    assert fault in report.faults
    assert not report.passed


def linear_model() -> nnx.Module:
    return nnx.Linear(3, 4, rngs=nnx.Rngs(0))


IN_SEQUENTIAL = {
    "twin": torch.nn.Sequential(torch.nn.LSTM(3, 4)),
    "model": LSTM(3, 4, rngs=nnx.Rngs(0)),
}
NEED_TORCH = {"edge_inputs": True, "precision": "low"}
REFUSED = [
    ("needs a loader", {"model": lambda w, x: x}),
    ("expected a function of a state_dict", {"model": lambda w, x: x, "weights": {}}),
    ("a loader makes", {"weights": lambda w: w}),
    ("JAX: expected a tree", {"model": lambda w, x: "y", "weights": dict}),
    *(("^model: expected an", {"model": m}) for m in (None, 3, nnx.Linear, torch.nn.Linear(3, 4))),
    ("^model:", {"model": nnx.eval_shape(linear_model)}),
    ("^twin: expected weights", {"twin": torch.nn.Linear(3, 4, device="meta")}),
    ("^twin: .* calls torch", {"twin": lambda x: torch.relu(x), "model": lambda x: x}),
    *(("^dtypes:", {"dtypes": dtypes}) for dtypes in ((), 3, ([],), np.dtype("float32"))),
    ("^twin: expected a model with weights", {"twin": linen.Dense(3), "model": linen.Dense(3)}),
    ("twin:", {"twin": nnx.Linear}),
    *((f"{name}:", {"twin": linear_model(), name: x}) for name, x in NEED_TORCH.items()),
    ("^platform: this machine", {"platform": "tpu"}),
    ("^platform: expected one", {"platform": "foo"}),
    ("^locate:", {"locate": "yes"}),
    ("^names: expected torch", {"names": {"nix": ""}}),
    ("^names: expected JAX", {"names": {"": "nix"}}),
    ("^names: expected a dict", {"names": [("", "")]}),
    ("^seed:", {"seed": -1}),
    ("^seed:", {"seed": True}),
    (r"^inputs\[0\]:", {"inputs": [np.ones((2, 3), object)]}),
    (r"^inputs\[0\]\['x'\]:", {"inputs": [{"x": {1}}]}),
    (r"^inputs\[0\]:", {"inputs": [[[1.0, 2.0], [3.0]]]}),
    ("^kwargs:", {"kwargs": [1.0]}),
    ("^call:", {"call": 3}),
    ("^call_twin:", {"call_twin": torch.nn.Tanh()}),
    ("^weights: layout:", {"weights": 3}),
    (r'under "0\.": give twin\.get_submodule\("0"\) as the twin$', IN_SEQUENTIAL),
    ("^weights: Linear has no layout", {"weights": "keras"}),
    ("weights: the twin has no nix", {"model": linear_function, "weights": lambda w: w["nix"]}),
    ("^weights:", {"model": linear_function, "weights": lambda w: None}),
    (r"\['a'\]: expected an", {"model": linear_function, "weights": lambda w: {"a": "b"}}),
]


@pytest.mark.parametrize(("message", "given"), REFUSED)
def test_refuses(message, given):
    options = dict(given)
    twin, model = options.pop("twin", torch.nn.Linear(3, 4)), options.pop("model", linear_model())
    inputs = options.pop("inputs", [np.ones((2, 3))])
    with pytest.raises((KeyError, TypeError, ValueError), match=message):
        compare(twin, model, *inputs, **options)


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True),
        jnp.ones((2, 3), jnp.bfloat16),
        [[1.0, 2.0, 3.0]],
    ],
)
def test_inputs_may_be_of_any_library_and_dtype(x):
    model, dtypes = nnx.Linear(3, 4, rngs=nnx.Rngs(0)), ["float64", "float64"]
    report = compare(torch.nn.Linear(3, 4), model, x, weights=linear("", ""), dtypes=dtypes)
    assert report.passed, f"\n{report}"


def test_a_layer_of_the_package_needs_no_table():
    x = np.random.default_rng(0).standard_normal((2, 5, 3))
    module = twin(torch.nn.LSTM, 3, 4, batch_first=True)
    report = compare(module, LSTM(3, 4, rngs=nnx.Rngs(0)), x)
    assert report.passed, f"\n{report}"
    groups = {"outputs", "final state", "input gradient", "weight gradients"}
    assert report.errors["float32"].keys() == groups
