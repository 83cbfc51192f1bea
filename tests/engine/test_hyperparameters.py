"""Compares the hyperparameters of a torch layer or function with those of its JAX counterpart."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jax_models import RNN
from parity_tests import compare
from parity_tests.engine.traces.hyperparameters import (
    hyperparameter_differences,
    hyperparameters_of,
)

RNGS, KERNEL = nnx.Rngs(0), (3, 3)


def equinox_conv(**options):
    eqx = pytest.importorskip("equinox")
    return eqx.nn.Conv2d(2, 3, 3, key=jax.random.key(0), **options)


def keras_norm(**options):
    with jax.numpy_dtype_promotion("standard"):
        return pytest.importorskip("keras").layers.LayerNormalization(**options)


def torch_conv(*args, **options):
    return torch.nn.Conv2d(2, 3, 3, *args, **options)


def conv(**options):
    return nnx.Conv(2, 3, KERNEL, rngs=RNGS, **options)


def power(p):
    layer = torch.nn.Identity().eval()
    layer.p = p
    return layer


PAIRS = {
    "eps": (torch.nn.LayerNorm(3), nnx.LayerNorm(3, rngs=RNGS), ["eps 1e-05 | epsilon 1e-06"]),
    "no eps": (torch.nn.RMSNorm(3), nnx.RMSNorm(3, rngs=RNGS), ["eps None | epsilon 1e-06"]),
    "groups": (
        torch.nn.GroupNorm(2, 4),
        nnx.GroupNorm(4, num_groups=4, epsilon=1e-5, rngs=RNGS),
        ["num_groups 2 | num_groups 4"],
    ),
    "momentum": (
        torch.nn.BatchNorm1d(3),
        nnx.BatchNorm(3, rngs=RNGS),
        ["momentum 0.1 | 1 - momentum 0.01"],
    ),
    "momentum in evaluation": (
        torch.nn.BatchNorm1d(3, eps=1e-3).eval(),
        linen.BatchNorm(),
        ["eps 0.001 | epsilon 1e-05"],
    ),
    "momentum in evaluation in JAX": (
        torch.nn.BatchNorm1d(3),
        nnx.BatchNorm(3, use_running_average=True, rngs=RNGS),
        [],
    ),
    "rate in evaluation": (torch.nn.Dropout(0.5).eval(), nnx.Dropout(0.1), []),
    "dropout in evaluation": (
        torch.nn.MultiheadAttention(4, 2, dropout=0.5).eval(),
        nnx.MultiHeadAttention(4, 4, dropout_rate=0.1, rngs=RNGS),
        ["num_heads 2 | num_heads 4", "head_dim 2 | head_dim 1"],
    ),
    "p of another layer in evaluation": (power(2.0), power(3.0), ["p 2.0 | p 3.0"]),
    "the same momentum": (torch.nn.BatchNorm1d(3), linen.BatchNorm(momentum=0.9), []),
    "no bias": (torch.nn.Linear(2, 3, bias=False), linen.Dense(3), ["bias False | use_bias True"]),
    "rate": (torch.nn.Dropout(0.5), nnx.Dropout(0.1), ["p 0.5 | rate 0.1"]),
    "padding": (torch_conv(), conv(), ["padding (0, 0) | padding SAME"]),
    "the same padding": (torch_conv(padding=2, dilation=2), conv(kernel_dilation=2), []),
    "no padding": (torch_conv(), conv(padding="VALID", strides=1), []),
    "strides": (torch_conv(2), conv(padding=0), ["stride (2, 2) | strides 1"]),
    "the shapes decide": (torch_conv(2, 1), conv(strides=2), ["padding (1, 1) | padding SAME"]),
    "padding on one side": (
        torch.nn.Conv1d(2, 3, 3, padding=2),
        nnx.Conv(2, 3, (3,), padding="CAUSAL", rngs=RNGS),
        ["padding (2,) | padding CAUSAL"],
    ),
    "transposed": (
        torch.nn.ConvTranspose2d(2, 3, 3),
        nnx.ConvTranspose(2, 3, KERNEL, rngs=RNGS),
        [],
    ),
    "keras": (
        torch.nn.LayerNorm(3),
        lambda: keras_norm(epsilon=1e-3),
        ["eps 1e-05 | epsilon 0.001"],
    ),
    "equinox": (
        torch_conv(padding=1, bias=False),
        lambda: equinox_conv(padding=1, use_bias=False),
        [],
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_differences_are_shown_under_both_names(pair):
    layer, other, expected = PAIRS[pair]
    other = other() if pair in ("equinox", "keras") else other
    assert [
        *hyperparameter_differences(hyperparameters_of(layer), hyperparameters_of(other))
    ] == expected


def test_the_momentum_of_a_user_s_layer_is_not_converted():
    class BatchNorm(nnx.Module):
        def __init__(self):
            self.momentum = 0.1

    of_torch = hyperparameters_of(torch.nn.BatchNorm1d(3))
    assert not [*hyperparameter_differences(of_torch, hyperparameters_of(BatchNorm()))]


class Counted(torch.nn.Module):
    """A module with an option, a size that it derives, and a state."""

    def __init__(self, order: int = 2):
        super().__init__()
        self.order, self.taps, self.mode = order, order + 1, "eager"


class CountedInJax(nnx.Module):
    def __init__(self, order: int = 2, mode: str = "causal"):
        self.order, self.taps, self.mode = order, order + 1, mode


class WithoutOptions(nnx.Module):
    def __init__(self):
        self.order = 4


class Causal(torch.nn.Conv1d):
    def __init__(self, *args, causal: bool = True, **kwargs):
        super().__init__(*args, **kwargs)
        self.causal, self.left = causal, self.kernel_size[0] - 1


OPTIONS = {
    "an attribute of each": (Counted(), CountedInJax(), []),
    "an option of both": (Counted(), CountedInJax(3), ["order 2 | order 3"]),
    "an option of one": (Counted(), WithoutOptions(), []),
    "nn.LSTM has a mode that is no option": (torch.nn.LSTM(3, 4), CountedInJax(), []),
    "an option in an overload": (
        torch.nn.RNN(3, 4),
        RNN(3, 4, nonlinearity="relu", rngs=RNGS),
        ["nonlinearity tanh | nonlinearity relu"],
    ),
    "an option of the base class": (
        Causal(2, 3, 3, padding_mode="circular"),
        torch.nn.Conv1d(2, 3, 3),
        ["padding_mode circular | padding_mode zeros"],
    ),
}


@pytest.mark.parametrize("pair", OPTIONS)
def test_only_options_of_both_constructors_are_compared(pair):
    layer, other, expected = OPTIONS[pair]
    assert [
        *hyperparameter_differences(hyperparameters_of(layer), hyperparameters_of(other))
    ] == expected


def test_what_a_layer_derives_from_its_options_is_no_hyperparameter():
    assert {"causal", "padding_mode", "in_channels"} <= hyperparameters_of(Causal(2, 3, 3)).keys()
    assert "left" not in hyperparameters_of(Causal(2, 3, 3))


def flax_norm(y):
    return (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + 1e-6)


FUNCTIONS = {
    "softplus with threshold 50.0 instead of 20: jax.nn.softplus has no threshold": (
        lambda y: torch.nn.functional.softplus(y + 21),
        lambda y: jax.nn.softplus(y + 21),
    ),
    "softplus with threshold 50.0 instead of 20.0: jax.nn.softplus has no threshold": (
        lambda y: torch.nn.Softplus(2.0, 20.0)(y + 10),
        lambda y: jax.nn.softplus(2 * (y + 10)) / 2,
    ),
    "gelu with approximate tanh instead of none: as jax.nn.gelu by default": (
        torch.nn.functional.gelu,
        jax.nn.gelu,
    ),
    "var with correction 0 instead of 1: as jnp.var and jnp.std by default": (
        lambda y: y.var(-1),
        lambda y: y.var(-1),
    ),
    "layer_norm with eps 1e-06 instead of 1e-05: as the norms of Flax by default": (
        lambda y: torch.nn.functional.layer_norm(y, (4,)),
        flax_norm,
    ),
}


@pytest.mark.parametrize("hint", FUNCTIONS)
@pytest.mark.parametrize("is_right", [True, False], ids=["alone", "beside another fault"])
def test_an_argument_of_a_function_is_named_if_it_alone_differs(x64, hint, is_right):
    function, of_jax = FUNCTIONS[hint]
    scale = 1 if is_right else 1.001
    report = compare(
        torch.nn.Linear(4, 4, bias=False),
        lambda w, x: scale * of_jax(x @ w["weight"].T),
        np.random.default_rng(0).standard_normal((5, 4)),
        weights=dict,
        call_twin=lambda twin, x: function(twin(x)),
        dtypes="float64",
    )
    assert not report.passed
    expected = [f"in float64, both sides agree if torch computes {hint}"] if is_right else []
    assert [note for note in report.notes if "both sides agree" in note] == expected
