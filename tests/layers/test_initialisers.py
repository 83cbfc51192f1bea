"""Initializers that users choose, and the names of mesh axes that they attach to parameters."""

import inspect
import itertools
import re
from functools import partial

import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from test_options import SIZES, build

import jax_models
from jax_models import GRU, LSTM, RNN

INITS = {
    "kernel_init": (nnx.initializers.normal(), (None, "model")),
    "recurrent_kernel_init": (nnx.initializers.normal(), ("model", None)),
    "bias_init": (nnx.initializers.normal(), ("model",)),
}


def partitioned(name):
    known = inspect.signature(getattr(jax_models, name).__init__).parameters
    no_bias = ("RGLRU", "GatedMLP", "MLP", "ShortConvolution", "LatentAttention")  # by default
    unused = {"bias_init"} if name in no_bias else set()
    return {k: nnx.with_partitioning(*v) for k, v in INITS.items() if k in known.keys() - unused}


def specs(layer):
    params = nnx.to_flat_state(nnx.get_partition_spec(nnx.state(layer, nnx.Param)))
    return {".".join(map(str, path)): param.get_value() for path, param in params}


def expected(path):
    """The expected axis names. Filters, norms and decays have their own initializers, no names."""
    if any(part in path for part in ("filter.", "ln", "norm", "dt_bias")):
        return P()
    *_, name = path.split(".")
    if name == "kernel_hh":
        return P("model", None)
    if "kernel" in name or name in ("B_re", "B_im", "C_re", "C_im"):
        return P(None, "model")
    return P("model") if "bias" in name else P()


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in SIZES if not re.search("Filter$|Norm$|VAD$", n)])
def test_axis_names_reach_the_parameters_and_stay(name):
    assert set(specs(nnx.eval_shape(partial(build, name))).values()) == {P()}
    with nnx.use_eager_sharding(False):
        biases = {"use_bias": True, "out_bias": True} if name == "Attention" else {}
        layer = nnx.eval_shape(partial(build, name, **biases, **partitioned(name)))
        names = specs(layer)
        assert names == {path: expected(path) for path in names}
        assert P(None, "model") in names.values()
        assert specs(nnx.merge(*nnx.split(layer))) == names


def test_initialisers_draw_the_parameters():
    inits = dict(zip(INITS, map(nnx.initializers.constant, (2, 3, 4)), strict=True))
    options = {"proj_features": 3, "proj_bias": True, "use_peepholes": True}
    layer = LSTM(5, 6, **options, **inits, rngs=nnx.Rngs(0))
    drawn = {name: set(w.ravel().tolist()) for name, w in layer.cells[0].arrays().items()}
    assert drawn == {
        "kernel_ih": {2}, "kernel_hr": {2}, "kernel_hh": {3},
        "bias_ih": {4}, "bias_hh": {0}, "bias_hr": {4}, "peephole": {4},
    }  # fmt: skip


FLAGS = ("use_bias", "recurrent_bias", "out_bias", "attention_bias")
NEEDED = {"Experts": {"shared_features": 8}}
"""The options without which a layer refuses a flag."""


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

            options = NEEDED.get(name, {}) | dict(zip(flags, values, strict=True)) | {init: draw}
            try:
                nnx.eval_shape(partial(build, name, **options))
            except ValueError as error:
                assert str(error).startswith(f"{init}: expected None with")  # noqa: PT017
                assert not drawn
            else:
                assert drawn, options


@pytest.mark.parametrize("layer", [RNN, LSTM, GRU])
def test_the_recurrent_bias_has_an_initialiser_of_its_own(layer):
    """A forget bias of 1 then stays 1, although the gates add both biases."""
    one, two = nnx.initializers.ones, nnx.initializers.constant(2)
    both, one_alone, two_alone, untouched = (
        layer(5, 6, **inits, rngs=nnx.Rngs(0)).cells[0].arrays()
        for inits in (
            {"bias_init": one, "recurrent_bias_init": two},
            {"bias_init": one},
            {"recurrent_bias_init": two},
            {},
        )
    )
    assert (both["bias_ih"] == 1).all()
    assert (one_alone["bias_hh"] == 0).all()
    assert (both["bias_hh"] == 2).all()
    assert (two_alone["bias_hh"] == 2).all()
    assert (two_alone["bias_ih"] == untouched["bias_ih"]).all()
    assert (untouched["bias_hh"] != untouched["bias_hh"][0]).any()
