"""Which axes of its parameters each language model lets a mesh divide."""

import dataclasses
from functools import partial

import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jax_models import (
    GatedMLP,
    GriffinRecurrence,
    Hawk,
    HawkLanguageModelConfig,
    HippogriffHawk,
    LanguageModel,
    LocalAttention,
)
from jax_models.mesh_axes import declared_mesh_axes, last_axis, whole
from parity_tests.registry import CASES
from train.digest import by_path
from train.mesh import MODEL, places

MESH = AbstractMesh((1, 1, 2), ("data", "sequence", "model"))
SCALE = 32
"""Makes the features of a case large beside its heads, ranks and taps, as those of real models."""


def widened(case):
    """The model of a case with more features, without values. None if it is no language model."""
    if not isinstance(model := case.abstract(jnp.float32), LanguageModel):
        return None
    sizes = dataclasses.asdict(model.config)
    sizes.pop("embed_features", None)  # of the positions that a filter reads, an odd number
    wide = {
        name: SCALE * size for name, size in sizes.items() if name.endswith("features") and size
    }
    config = dataclasses.replace(model.config, **wide)
    return nnx.eval_shape(lambda: config.build(rngs=nnx.Rngs(0)))


MODELS = {name: model for name, case in CASES.items() if (model := widened(case))}


def specs(model):
    """Where a mesh of two devices has each parameter."""
    found = places(model, MESH, fully_sharded=False)
    return {path.removesuffix(".value"): spec for path, spec in found.items()}


@pytest.mark.parametrize("name", MODELS)
def test_every_large_parameter_is_declared_and_divided(name):
    """Large: more than half of a matrix from features to features."""
    model = MODELS[name]
    declared, features = declared_mesh_axes(model), model.embedding.features
    params = by_path(nnx.state(model, nnx.Param))
    large = {path.removesuffix(".value") for path, x in params.items() if 2 * x.size > features**2}
    assert large
    assert large <= declared.keys()
    if divided := {path for path in large if declared[path] is not None}:
        assert divided == {path for path, spec in specs(model).items() if MODEL in spec} & large


griffin = partial(GriffinRecurrence, 32, num_blocks=4, hidden_features=48)
attention = partial(LocalAttention, 32, 4, window=9)


@pytest.mark.parametrize(
    ("layer", "path", "axis"),
    [
        (partial(Hawk, 32), "rglru.input_gate.kernel", 1),
        (partial(Hawk, 32), "rglru.a", 0),
        (griffin, "rglru.input_gate.kernel", 0),
        (griffin, "rglru.recurrence_gate.bias", 0),
        (griffin, "rglru.a_param", 0),
        (griffin, "conv.kernel", 1),
        (griffin, "recurrent_proj.bias", 0),
        (griffin, "out_proj.kernel", 0),
        (griffin, "out_proj.bias", None),
        (partial(HippogriffHawk, 32), "rglru.input_gate.kernel", 2),
        (partial(HippogriffHawk, 32), "rglru.recurrence_gate.bias", 1),
        (partial(HippogriffHawk, 32), "rglru.a_param", 0),
        (attention, "q_proj.kernel", 1),
        (attention, "k_proj.kernel", None),
        (partial(attention, num_kv_heads=4), "k_proj.kernel", 1),
    ],
)
def test_a_layer_is_divided_by_features_blocks_of_gates_or_heads(layer, path, axis):
    spec = specs(nnx.eval_shape(lambda: layer(rngs=nnx.Rngs(0))))[path]
    assert [i for i, name in enumerate(spec) if name == MODEL] == [*{axis} - {None}]


def test_a_width_that_does_not_divide_is_refused():
    mlp = nnx.eval_shape(lambda: GatedMLP(4, 5, rngs=nnx.Rngs(0)))
    message = "^mesh.model: expected a divisor of 5, the size of axis 'hidden' of down_proj.kernel"
    with pytest.raises(ValueError, match=message):
        specs(mlp)


@pytest.mark.parametrize(("size", "axis"), [(64, MODEL), (65, None)])
def test_a_vocabulary_is_divided_where_it_divides(size, axis):
    config = HawkLanguageModelConfig(vocab_size=size, features=8, num_layers=1, mlp_features=8)
    found = specs(nnx.eval_shape(lambda: config.build(rngs=nnx.Rngs(0))))
    assert found["embedding.embedding"] == P(axis, None)


def test_the_inner_layer_is_right():
    class Outer(nnx.Module):
        mesh_axes = last_axis("features", "mlp") | whole("other")

        def __init__(self, rngs):
            self.mlp = GatedMLP(4, 8, use_bias=True, rngs=rngs)
            self.other = nnx.Linear(4, 4, rngs=rngs)

    declared = declared_mesh_axes(nnx.eval_shape(lambda: Outer(nnx.Rngs(0))))
    assert declared["mlp.down_proj.kernel"] == ("hidden", 0)
    assert declared["mlp.down_proj.bias"] == ("features", -1)
    assert declared["other.bias"] is None
