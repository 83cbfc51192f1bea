"""A user's initialisers, and the names of mesh axes that they give to parameters."""

import inspect
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from test_options import SIZES, build

import jax_models
from jax_models import GRU, LSTM, RNN, Stack, from_torch, to_torch

INITS = {
    "kernel_init": (nnx.initializers.normal(), (None, "model")),
    "recurrent_kernel_init": (nnx.initializers.normal(), ("model", None)),
    "bias_init": (nnx.initializers.normal(), ("model",)),
}


def partitioned(name):
    known = inspect.signature(getattr(jax_models, name).__init__).parameters
    unused = {"bias_init"} if name in ("RGLRU", "GatedMLP") else set()  # have no bias by default
    return {k: nnx.with_partitioning(*v) for k, v in INITS.items() if k in known.keys() - unused}


def specs(layer):
    params = nnx.to_flat_state(nnx.get_partition_spec(nnx.state(layer, nnx.Param)))
    return {".".join(map(str, path)): param.get_value() for path, param in params}


def expected(path):
    """The filters, the norms and published models have draws of their own."""
    if any(part in path for part in ("filter.", "ln", "norm")):
        return P()
    *_, name = path.split(".")
    if name == "kernel_hh":
        return P("model", None)
    if "kernel" in name:
        return P(None, "model")
    return P("model") if "bias" in name else P()


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in SIZES
        if "Filter" not in name and "Norm" not in name[-5:] and name != "SileroVAD"
    ],
)
def test_axis_names_reach_the_parameters_and_stay(name):
    assert set(specs(nnx.eval_shape(partial(build, name))).values()) == {P()}
    with nnx.use_eager_sharding(False):
        layer = nnx.eval_shape(partial(build, name, **partitioned(name)))
        names = specs(layer)
        assert names == {path: expected(path) for path in names}
        assert P(None, "model") in names.values()
        assert specs(nnx.merge(*nnx.split(layer))) == names
        loaded = from_torch(layer, to_torch(build(name))) if name != "GatedMLP" else layer
        assert specs(loaded) == names


def test_initialisers_draw_the_parameters():
    layer = LSTM(
        5,
        6,
        proj_features=3,
        proj_bias=True,
        use_peepholes=True,
        kernel_init=nnx.initializers.constant(2),
        recurrent_kernel_init=nnx.initializers.constant(3),
        bias_init=nnx.initializers.constant(4),
        rngs=nnx.Rngs(0),
    )
    drawn = {name: set(w.ravel().tolist()) for name, w in layer.cells[0].arrays().items()}
    assert drawn == {
        "kernel_ih": {2}, "kernel_hr": {2}, "kernel_hh": {3},
        "bias_ih": {4}, "bias_hh": {0}, "bias_hr": {4}, "peephole": {4},
    }  # fmt: skip


FLAGS = ("use_bias", "recurrent_bias", "out_bias", "attention_bias")


@pytest.mark.parametrize("name", SIZES)
def test_an_initialiser_draws_something_or_is_refused(name):
    known = inspect.signature(getattr(jax_models, name).__init__).parameters
    flags = [flag for flag in FLAGS if flag in known]
    for init in (option for option in known if option.endswith("_init")):
        for values in itertools.product((False, True), repeat=len(flags)):
            drawn = []

            def draw(key, shape, dtype, drawn=drawn):
                drawn.append(shape)
                return jnp.zeros(shape, dtype)

            options = dict(zip(flags, values, strict=True)) | {init: draw}
            try:
                build(name, **options)
            except ValueError as error:
                assert str(error).startswith(f"{init}: expected None with")  # noqa: PT017
                assert not drawn
            else:
                assert drawn, options


def test_an_initialiser_that_overrides_the_variance_is_refused():
    init = nnx.initializers.normal()
    with pytest.raises(ValueError, match=r"^out_variance:"):
        build("GriffinBlock", kernel_init=init, out_variance=0.5)


@pytest.mark.parametrize("layer", [RNN, LSTM, GRU])
def test_the_recurrent_bias_has_an_initialiser_of_its_own(layer):
    """A forget bias of 1 stays 1: the gates see the sum of both biases."""
    one, two = nnx.initializers.ones, nnx.initializers.constant(2)
    for options, sums, recurrent in (
        ({"bias_init": one}, {1.0}, {0.0}),
        ({"bias_init": one, "recurrent_bias_init": two}, {3.0}, {2.0}),
        ({"bias_init": one, "recurrent_bias": False}, {1.0}, set()),
    ):
        if layer is GRU and "recurrent_bias" in options:
            continue
        cell = layer(5, 6, **options, rngs=nnx.Rngs(0)).cells[0].arrays()
        biases = [bias for name, bias in cell.items() if name.startswith("bias")]
        assert set(sum(biases).tolist()) == sums
        assert set(cell["bias_hh"].tolist() if "bias_hh" in cell else ()) == recurrent
    alone = layer(5, 6, recurrent_bias_init=two, rngs=nnx.Rngs(0)).cells[0]
    untouched = layer(5, 6, rngs=nnx.Rngs(0)).cells[0]
    assert jnp.array_equal(alone.bias_ih[...], untouched.bias_ih[...])
    assert set(alone.bias_hh[...].tolist()) == {2}
    assert len(set(untouched.bias_hh[...].tolist())) > 1


def test_a_partitioned_layer_runs_on_a_mesh():
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.ones((2, 3, 8))
    with jax.set_mesh(mesh):
        layer = Stack(
            [LSTM(8, 8, rngs=nnx.Rngs(0), **partitioned("LSTM")) for _ in range(2)],
            scan_layers=True,
        )
        assert layer.layers[0].cells[0].kernel_ih.sharding.spec == P(None, "model")
        y, _ = nnx.jit(lambda layer, x: layer(x))(layer, x)
        assert y.shape == x.shape
        spec = nnx.get_partition_spec(nnx.state(layer))
        assert spec["layers"][0]["cells"][0]["kernel_hh"].get_value() == P("model", None)
