"""Layers that several architectures share, each of which declares its own keys for them."""

import ast
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

import jax_models
from jax_models import GRU, Attention, GatedMLP, from_torch, to_torch
from jax_models.weights import SharedLayer, layouts_of

SHARED = {
    layer
    for layer in vars(jax_models).values()
    if isinstance(layer, type) and issubclass(layer, SharedLayer) and layer._declared
}
"""The layers whose keys the file of an architecture declares."""


@pytest.mark.parametrize("layer", sorted(SHARED, key=lambda layer: layer.__name__))
def test_a_shared_layer_names_no_architecture(layer):
    """Neither the file of a layer nor those that it imports from contain a layout's name."""
    own = Path(inspect.getfile(layer))
    declared = {Path(inspect.getfile(function)) for function in layer._declared.values()}
    assert own not in declared
    tree = ast.parse(own.read_text(encoding="utf-8"))
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    for file in declared:
        assert file.stem not in texts
        assert not any(module.endswith(f".{file.stem}") for module in modules)


@pytest.fixture
def mlp_class():
    """A class of its own for each test, because declared layouts stay."""

    class MLP(GatedMLP):
        pass

    return MLP


def projections(mlp):
    return {} if mlp.use_bias else {"mine": mlp.rows("gate", "up", "down")}


def test_a_layer_is_saved_under_the_keys_of_an_architecture(mlp_class):
    inherited = mlp_class(3, 4, rngs=nnx.Rngs(0)).torch_layouts()
    assert next(iter(inherited)) == "hawk"
    assert layouts_of(mlp_class)(projections) is projections
    mlp, other = (mlp_class(3, 4, rngs=nnx.Rngs(seed)) for seed in range(2))
    weights = to_torch(mlp, "mine")
    assert [*weights] == ["gate.weight", "up.weight", "down.weight"]
    np.testing.assert_array_equal(weights["up.weight"], mlp.up_proj.kernel[...].T)
    for key, array in to_torch(from_torch(other, weights)).items():
        np.testing.assert_array_equal(array, weights[key])
    assert not mlp_class(3, 4, use_bias=True, rngs=nnx.Rngs(0)).torch_layouts()
    assert "mine" not in GatedMLP(3, 4, rngs=nnx.Rngs(0)).torch_layouts()


def test_the_default_is_the_first_layout(mlp_class):
    layouts_of(mlp_class)(projections)

    def renamed(keys):
        return lambda mlp: {name: mlp.rows(*keys) for name in ("other", "third")}

    def declare(keys):
        function = renamed(keys)
        function.__qualname__ = "others"
        layouts_of(mlp_class, default=True)(function)

    declare("abc")
    mlp = mlp_class(3, 4, rngs=nnx.Rngs(0))
    assert [*mlp.torch_layouts()] == ["other", "third", "mine"]
    declare("xyz")  # as if its module were reloaded
    assert [*to_torch(mlp)] == ["x.weight", "y.weight", "z.weight"]


def test_what_cannot_be_declared(mlp_class):
    layouts_of(mlp_class)(projections)
    layouts_of(mlp_class)(lambda mlp: projections(mlp))
    message = f"layouts_of(MLP): expected new names in {__name__}, got mine, which another"
    with pytest.raises(ValueError, match=f"^{re.escape(message)} architecture declares$"):
        mlp_class(3, 4, rngs=nnx.Rngs(0)).torch_layouts()
    for layer in (GRU, Attention(4, 2, rngs=nnx.Rngs(0))):
        with pytest.raises(TypeError, match=r"such as Attention, got .*: build its table in the"):
            layouts_of(layer)
