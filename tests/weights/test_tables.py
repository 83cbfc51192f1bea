"""Weight tables for layers that both frameworks have: equal results, and bitwise equal exports."""

import inspect
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

from jax_models import from_torch, to_torch, weights
from jax_models.weights import (
    added,
    batch_norm,
    conv,
    conv_transpose,
    expanded,
    gates,
    group_norm,
    ignored,
    layer_norm,
    linear,
    linear_general,
    linear_of_image,
    loader,
    multi_head_attention,
    parts,
    squeezed,
    stacked,
    tied,
    transposed,
    unused,
)
from parity_tests import compare, compare_training
from parity_tests.engine.bounds.tolerance import assert_same

pytestmark = pytest.mark.usefixtures("x64", "standard_promotion")


def image(*size: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(size)


def channels_last(module, x):
    """Calls the torch module on an image whose channels are the last axis."""
    return module(x.movedim(-1, 1)).movedim(1, -1)


def attended(module, x, y=None):
    y = x if y is None else y
    return module(x, y, y, need_weights=False)[0]


def attention(q, k, v, **_):
    """Attention without Flax's float32 softmax."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


class Grouped(nnx.Module):
    """A transposed convolution with two groups."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(jnp.zeros((3, 2, 2, 6)))
        self.bias = nnx.Param(jnp.zeros(6))

    def __call__(self, x):
        layout = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": 2}
        padding = ((2, 2), (1, 1))
        y = jax.lax.conv_general_dilated(
            x, self.kernel[...], (1, 1), padding, lhs_dilation=(2, 2), **layout
        )
        return y + self.bias[...]


nn = torch.nn


OF_IMAGES = (nn.modules.conv._ConvNd, nn.GroupNorm, nn.BatchNorm2d)


def entry(module, build, table, *inputs, call=lambda module, *inputs: module(*inputs)):
    """A layer in both frameworks, and the calls that a test compares."""
    return module, build, table, inputs, channels_last if isinstance(module, OF_IMAGES) else call


# The registry's cases have all other layers.
LAYERS = {
    "Linear from heads": entry(
        nn.Linear(6, 4),
        partial(nnx.LinearGeneral, (3, 2), 4, axis=(-2, -1)),
        linear_general("", "", in_shape=(3, 2), out_shape=(4,)),
        image(5, 3, 2),
        call=lambda module, x: module(x.flatten(-2)),
    ),
    "Linear to heads": entry(
        nn.Linear(4, 6, bias=False),
        partial(nnx.LinearGeneral, 4, (3, 2), use_bias=False),
        linear_general("", "", in_shape=(4,), out_shape=(3, 2), bias=False),
        image(5, 4),
        call=lambda module, x: module(x).unflatten(-1, (3, 2)),
    ),
    "Linear of an image": entry(
        nn.Linear(3 * 4 * 5, 2),
        partial(nnx.Linear, 3 * 4 * 5, 2),
        linear_of_image("", "", shape=(3, 4, 5)),
        image(2, 4 * 5 * 3),
        call=lambda module, x: module(x.unflatten(-1, (4, 5, 3)).movedim(-1, 1).flatten(1)),
    ),
    "Conv2d in groups": entry(
        nn.Conv2d(4, 6, (3, 2), groups=2, bias=False),
        partial(nnx.Conv, 4, 6, (3, 2), feature_group_count=2, padding="VALID", use_bias=False),
        conv("", "", bias=False),
        image(2, 7, 6, 4),
    ),
    "Conv1d": entry(
        nn.Conv1d(3, 4, 3),
        partial(nnx.Conv, 3, 4, 3, padding="VALID"),
        conv("", ""),
        image(2, 7, 3),
    ),
    "ConvTranspose2d": entry(
        nn.ConvTranspose2d(3, 4, (3, 2), stride=2),
        partial(nnx.ConvTranspose, 3, 4, (3, 2), 2, padding="VALID"),
        conv_transpose("", ""),
        image(2, 3, 4, 3),
    ),
    "ConvTranspose1d, transposed kernel": entry(
        nn.ConvTranspose1d(3, 4, 3, stride=2),
        partial(nnx.ConvTranspose, 3, 4, 3, 2, padding="VALID", transpose_kernel=True),
        conv_transpose("", "", transpose_kernel=True),
        image(2, 5, 3),
    ),
    "ConvTranspose2d in groups": entry(
        nn.ConvTranspose2d(4, 6, (3, 2), stride=2, groups=2),
        Grouped,
        conv_transpose("", "", groups=2),
        image(2, 3, 4, 4),
    ),
    "GroupNorm": entry(
        nn.GroupNorm(2, 6),
        partial(nnx.GroupNorm, 6, 2, epsilon=1e-5),
        group_norm("", ""),
        image(2, 5, 6),
    ),
    "BatchNorm2d": entry(
        nn.BatchNorm2d(5),
        partial(nnx.BatchNorm, 5, use_running_average=True),
        batch_norm("", ""),
        image(2, 3, 4, 5),
    ),
    "BatchNorm1d without scale": entry(
        nn.BatchNorm1d(5, affine=False),
        partial(nnx.BatchNorm, 5, use_running_average=True, use_scale=False, use_bias=False),
        batch_norm("", "", affine=False),
        image(7, 5),
    ),
    "MultiheadAttention": entry(
        nn.MultiheadAttention(6, 2, batch_first=True),
        partial(nnx.MultiHeadAttention, 2, 6, decode=False, attention_fn=attention),
        multi_head_attention("", "", num_heads=2, features=6),
        image(3, 4, 6),
        call=attended,
    ),
    "MultiheadAttention of other keys": entry(
        nn.MultiheadAttention(6, 2, kdim=5, vdim=5, batch_first=True),
        partial(
            nnx.MultiHeadAttention, 2, 6, in_kv_features=5, decode=False, attention_fn=attention
        ),
        multi_head_attention("", "", num_heads=2, features=6, kv_features=5),
        image(3, 4, 6),
        image(3, 7, 5),
        call=attended,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_the_same_and_gives_its_weights_back(name):
    module, build, table, inputs, call = LAYERS[name]
    torch.manual_seed(0)
    for weight in module.state_dict().values():
        if weight.is_floating_point():
            weight.copy_(torch.rand_like(weight) + 0.5)
    module = module.double().eval()
    layer = build(rngs=nnx.Rngs(0))
    nnx.update(
        layer, jax.tree.map(lambda a: a.astype(float), nnx.state(layer, (nnx.Param, nnx.BatchStat)))
    )
    from_torch(layer, module.state_dict(), table)
    with torch.no_grad():
        expected = call(module, *map(torch.tensor, inputs)).numpy()
    assert_same(layer(*map(jnp.asarray, inputs)), expected, "outputs")
    weights = {key: weight.numpy() for key, weight in module.state_dict().items()}
    jax.tree.map(np.testing.assert_array_equal, to_torch(layer, table), weights)


@pytest.mark.parametrize("name", ["ConvTranspose2d in groups", "MultiheadAttention"])
def test_gradients_go_by_a_table(name):
    module, build, table, inputs, call = LAYERS[name]
    report = compare(
        module, build(rngs=nnx.Rngs(0)), *inputs, weights=table, call_twin=call, dtypes="float64"
    )
    assert report.passed, str(report)


class Cell(nnx.Module):
    """torch's LSTMCell with a single bias, like the cells of Flax and Equinox."""

    def __init__(self, rngs):
        self.cell = nnx.OptimizedLSTMCell(3, 4, rngs=rngs)

    def __call__(self, x, h, c):
        return self.cell((c, h), x)[1]


CELL = [
    transposed("cell.dense_i.kernel", "weight_ih"),
    transposed("cell.dense_h.kernel", "weight_hh"),
    added("cell.dense_h.bias", ("bias_ih", "bias_hh")),
]


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_a_key_that_no_parameter_holds_has_no_gradient(dtype):
    """The comparison fails if torch's results depend on the key, whatever its dtype."""
    twin = torch.nn.Module()
    twin.linear, twin.scale = torch.nn.Linear(3, 4), torch.nn.Parameter(torch.ones(4))
    port = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    table = [*linear("", "linear"), unused("scale", np.ones(4, dtype))]
    for call, expected in (
        (lambda twin, x: twin.linear(x), True),
        (lambda twin, x: twin.linear(x) * twin.scale, False),
    ):
        report = compare(twin, port, image(2, 3), weights=table, call_twin=call)
        assert report.passed is expected, str(report)
    state_dict = {**twin.state_dict(), "scale": torch.full((4,), 2.0, dtype=torch.float64)}
    exported = to_torch(from_torch(port, state_dict, table), table)["scale"]
    assert (exported.dtype, exported.tolist()) == (dtype, [1] * 4)
    with pytest.raises(ValueError, match="scale:"):
        from_torch(port, state_dict | {"scale": torch.ones(5)}, table)


def test_an_ignored_key_is_neither_read_nor_written():
    """It may be missing, of any shape, and a constant of a twin that is compared."""
    twin = nn.Linear(3, 4)
    weights, table = twin.state_dict(), [*linear("", ""), ignored("decay")]
    port = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    for decay in ({}, {"decay": torch.ones(2)}, {"decay": torch.ones(5, 6)}):
        assert to_torch(from_torch(port, weights | decay, table), table).keys() == weights.keys()
    twin.register_buffer("decay", torch.full((2,), 0.5))
    report = compare(twin, port, image(2, 3), weights=table)
    assert report.passed, str(report)
    with pytest.raises(ValueError, match="unexpected key other"):
        from_torch(port, weights | {"other": torch.ones(2)}, table)


def test_two_biases_in_one():
    """Their gradients are equal, so each step of torch changes their sum twice as much."""
    cell, inputs = nn.LSTMCell(3, 4), (image(2, 3), image(2, 4), image(2, 4))

    def call(cell, x, h, c):
        return cell(x, (h, c))[0]

    report = compare(cell, Cell(nnx.Rngs(0)), *inputs, weights=CELL, call_twin=call)
    assert report.passed, str(report)
    back = to_torch(from_torch(Cell(nnx.Rngs(0)), cell.state_dict(), CELL), CELL)
    total = (cell.bias_ih + cell.bias_hh).detach().numpy()
    np.testing.assert_array_equal(back["bias_ih"], total)
    assert not back["bias_hh"].any()
    twice = optax.masked(optax.scale(2.0), partial(jax.tree.map, lambda p: p.ndim == 1))
    trained = compare_training(
        cell,
        Cell(nnx.Rngs(0)),
        [inputs] * 3,
        loss=lambda model, batch: (model(*batch) ** 2).mean(),
        loss_twin=lambda twin, batch: call(twin, *batch).square().mean(),
        optimizer=optax.chain(twice, optax.sgd(0.1)),
        optimizer_twin=lambda twin: torch.optim.SGD(twin.parameters(), lr=0.1),
        weights=CELL,
    )
    assert trained.passed, str(trained)


TREE_ROWS = {
    "parts": (parts(["a", "b"], "k"), {"k": image(6, 2)}, {"a": (2, 3), "b": (2, 3)}),
    "parts as they are": (
        parts(["a", "b"], "k", transpose=False),
        {"k": image(6)},
        {"a": (3,), "b": (3,)},
    ),
    "stacked": (stacked(("a", "b"), "k", (1,)), {"k": image(2, 1, 3)}, {"a": (3,), "b": (3,)}),
    "gates": (gates("a", ["k", "l"]), {"k": image(3, 2), "l": image(3, 2)}, {"a": (2, 6)}),
    "expanded": (expanded("a", "k", (-2, -1)), {"k": image(3)}, {"a": (3, 1, 1)}),
    "squeezed": (squeezed("a", "k", (0,)), {"k": image(1, 3)}, {"a": (3,)}),
    "tied": (tied("a", ("k", "l")), {"k": image(3), "l": image(3)}, {"a": (3,)}),
}


@pytest.mark.parametrize("name", TREE_ROWS)
@pytest.mark.parametrize("traced", [False, True])
def test_a_row_in_a_tree_and_back(name, traced):
    row, state_dict, shapes = TREE_ROWS[name]
    load = loader({path: jnp.zeros(shape) for path, shape in shapes.items()}, [row])
    tree = (jax.jit(load) if traced else load)(state_dict)
    assert {path: a.shape for path, a in tree.items()} == shapes
    back = row.to_torch(*(tree[path] for path in row.params))
    for array, key in zip(back, row.keys, strict=True):
        np.testing.assert_array_equal(array, state_dict[key])


def test_what_does_not_fit_a_tree():
    tree = {"out": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}, "steps": jnp.array(3)}
    with pytest.raises(ValueError, match=r"^table: no row for the parameter out\.bias$"):
        loader(tree, linear("out", "head", bias=False))
    load = loader(tree, linear("out", "head"))
    with pytest.raises(ValueError, match="does not fit a tree of 2 arrays") as error:
        load({"head.weight": image(2, 4), "b": image(2)})
    assert all(key in str(error.value) for key in ("key head.bias", "head.weight:", "key b"))


FUNCTIONS = {name: value for name, value in vars(weights).items() if inspect.isfunction(value)}


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_the_page_names_every_function(name):
    page = Path(__file__).parents[2] / "docs" / "design" / "weight_tables.md"
    assert f"`{name}" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "table",
    [
        partial(function, **options)
        for function, options in {
            **{each: {} for each in (linear, weights.dense, conv, conv_transpose, layer_norm)},
            linear_general: {"in_shape": (2,), "out_shape": (3,)},
            linear_of_image: {"shape": (1, 2, 3)},
            multi_head_attention: {"num_heads": 2, "features": 4},
        }.items()
    ],
)
def test_a_bias_has_both_names(table):
    def keys(**options):
        return [row.keys for row in table("param", "key", **options)]

    assert keys(bias=False) == keys(use_bias=False) == [k for k in keys() if "bias" not in str(k)]
    with pytest.raises(ValueError, match=r"^bias, use_bias: .* got bias=True and use_bias=False"):
        keys(bias=True, use_bias=False)
