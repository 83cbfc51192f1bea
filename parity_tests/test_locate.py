"""A fault on purpose in each architecture: the report must name the submodule that has it."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from parity_tests.cases import CASES
from parity_tests.locate import find_departure
from parity_tests.problem import problem


def at(model: nnx.Module, path: str):
    """The submodule or parameter at a path."""
    for part in path.split("."):
        model = model[int(part)] if part.isdigit() else getattr(model, part)
    return model


def zeroed(path):
    """A bias is forgotten."""

    def fault(model):
        at(model, path)[...] = jnp.zeros_like(at(model, path)[...])

    return fault


def transposed(path):
    """A square weight is not transposed."""

    def fault(model):
        at(model, path)[...] = at(model, path)[...].T

    return fault


def epsilon(path):
    """A norm has another epsilon."""

    def fault(model):
        at(model, path).epsilon = 2 * at(model, path).epsilon

    return fault


def swapped_gates(path):
    """The first two gates change places."""

    def fault(model):
        for name in ("kernel_ih", "kernel_hh", "bias_ih"):
            param = at(model, path + "." + name)
            first, second, *rest = jnp.split(param[...], 4, axis=-1)
            param[...] = jnp.concatenate([second, first, *rest], axis=-1)

    return fault


FAULTS = [
    ("RNNLanguageModel of LSTM", swapped_gates("layers.cells.0"), "rnn"),
    ("RNNLanguageModel", epsilon("norm"), "layer_norm"),
    ("RNNLanguageModel of GRU", zeroed("head.bias"), "proj"),
    (
        "HawkLanguageModel",
        epsilon("layers.layers.1.temporal_pre_norm"),
        "blocks.1.temporal_pre_norm",
    ),
    ("HawkLanguageModel", zeroed("layers.layers.0.hawk.conv.bias"), "blocks.0.hawk.conv.conv"),
    ("HawkBlock", transposed("hawk.rglru.input_gate.kernel"), "hawk.rglru"),
    ("RWKVLanguageModel", transposed("layers.layers.1.att.output.kernel"), "blocks.1.att.output"),
    ("RWKVLanguageModel", zeroed("layers.layers.0.ln0.bias"), "blocks.0.ln0"),
    ("GPModel of hyena", transposed("layers.layers.1.proj_output.kernel"), "layers.1.proj_output"),
    ("GPModel of hyena", zeroed("layers.layers.0.B"), "layers.0"),
    ("AuthenticHyenaBlock, implicit, order 2", zeroed("filter.biases.0"), "filter"),
    ("GPModel of attention", epsilon("layers.layers.1.ln1"), "layers.1.ln1"),
    ("HyperLSTM 2 layers", zeroed("cells.1.z_bias"), ""),
]


@pytest.mark.parametrize(("name", "fault", "culprit"), FAULTS)
def test_a_fault_is_found_where_it_is(name, fault, culprit):
    right = problem(CASES[name])

    def build(twin, dtype):
        model = right.build(twin, dtype)
        fault(model)
        return model

    location = find_departure(dataclasses.replace(right, build=build), "float64", {})
    assert location.culprit == culprit, f"\n{location}"


@pytest.mark.parametrize("name", ["HawkBlock", "RWKVLanguageModel", "GPModel of hyena"])
def test_no_fault_is_found_where_there_is_none(name):
    location = find_departure(problem(CASES[name]), "float32", {})
    assert location.culprit is None, f"\n{location}"
    assert str(location).endswith("first to depart: none, the forward pass agrees")


def late_by_one(delayed):
    def faulty(*args, **kwargs):
        (previous, current), state = delayed(*args, **kwargs)
        return (jnp.roll(previous, 1, axis=1), current), state

    return faulty


FAULTY_FUNCTIONS = [
    ("GPModel of attention", "jax.nn", "gelu", lambda gelu: lambda x, **_: gelu(x), "layers.0.mlp"),
    ("RWKVLanguageModel", "jax_models.ops", "delayed", late_by_one, "blocks.0.att"),
]


@pytest.mark.parametrize(("name", "module", "attribute", "fault", "culprit"), FAULTY_FUNCTIONS)
def test_a_faulty_function_is_found_where_it_is_called(
    monkeypatch, name, module, attribute, fault, culprit
):
    module = importlib.import_module(module)
    monkeypatch.setattr(module, attribute, fault(getattr(module, attribute)))
    jax.clear_caches()
    location = find_departure(problem(CASES[name]), "float64", {})
    assert location.culprit == culprit, f"\n{location}"
    monkeypatch.undo()
    jax.clear_caches()
