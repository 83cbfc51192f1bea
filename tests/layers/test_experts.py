"""Properties of mixtures of experts that the registry does not check."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_models import Experts, from_torch, load_balancing_loss, to_torch
from jax_models.mesh_axes import declared_mesh_axes
from jax_models.weights.layouts import params_of
from parity_tests.registry import CASES

GROUPS: dict[str, Any] = {"scores": "sigmoid", "num_groups": 4, "groups_per_token": 2}


def build(**options: Any) -> Experts:
    return Experts(5, 4, 8, 3, use_expert_bias=True, **options, rngs=nnx.Rngs(0))


def tokens(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((*shape, 5)).astype(np.float32)


@pytest.mark.parametrize("options", [{}, GROUPS], ids=["softmax", "groups"])
def test_a_token_does_not_depend_on_others(options):
    """If all other tokens go to one expert, this expert still takes the token."""
    call, x = jax.jit(build(**options).__call__), tokens(40)
    crowded = np.broadcast_to(x[7], x.shape).copy()
    crowded[3] = x[3]
    found, expected = call(crowded), call(x)
    np.testing.assert_allclose(found[3], expected[3], rtol=1e-6)
    np.testing.assert_allclose(found[0], expected[7], rtol=1e-6)


def test_the_bias_chooses_but_is_not_trained():
    experts, x = build(**GROUPS), tokens(6)
    params = nnx.to_flat_state(nnx.state(experts, nnx.Param))
    assert ("expert_bias",) not in [path for path, _ in params]
    assert experts.expert_bias is not None
    before, _ = experts.route(jnp.asarray(x))
    experts.expert_bias[...] = jnp.full(8, 0.7)
    np.testing.assert_array_equal(experts.route(jnp.asarray(x))[0], before)
    experts.expert_bias[...] = experts.expert_bias[...].at[:2].set(50.0)
    chosen = experts.route(jnp.asarray(x))[1]
    assert (jnp.sort(chosen[:, :2], axis=1) == jnp.arange(2)[None]).all()


def test_the_keys_of_single_experts_and_of_stacks_have_the_same_matrices():
    experts = build()
    stacked = experts.rows("r", "in", "in", "out", "b")
    single = experts.rows("r", "{}.w1", "{}.w3", "{}.w2", "b")
    weights, of_each = to_torch(experts, stacked), to_torch(experts, single)
    assert weights["in"].shape == (8, 8, 5)
    assert len(of_each) == 2 + 3 * 8
    for i in range(8):
        gate, up = np.split(weights["in"][i], 2)
        np.testing.assert_array_equal(gate, of_each[f"{i}.w1"])
        np.testing.assert_array_equal(up, of_each[f"{i}.w3"])
        np.testing.assert_array_equal(weights["out"][i], of_each[f"{i}.w2"])
    for table, given in ((stacked, weights), (single, of_each)):
        read = from_torch(build(), given, table)
        jax.tree.map(np.testing.assert_array_equal, to_torch(read, stacked), weights)


def test_the_balancing_loss_is_that_of_all_layers_together():
    """The router of the second layer prefers one expert, and two tokens are padding."""
    layers = [Experts(5, 4, 8, 3, track_load=True, rngs=nnx.Rngs(i)) for i in range(2)]
    layers[1].router_kernel[...] += 3 * jnp.eye(5, 8)
    model, x = nnx.List(layers), tokens(4, 10)
    active = np.ones((4, 10), bool)
    active[1, 7:] = False
    assert load_balancing_loss(model) == 0
    for layer in layers:
        layer(x, active=active)
    scores = [np.asarray(jax.nn.softmax(x @ layer.router_kernel[...]))[active] for layer in layers]
    chosen = [np.argsort(-each)[:, :3] for each in scores]
    used = np.bincount(np.ravel(chosen), minlength=8) / (2 * active.sum())
    expected = 8 * np.sum(used * np.concatenate(scores).mean(axis=0))
    np.testing.assert_allclose(load_balancing_loss(model), expected, rtol=1e-5)
    assert expected > 3.1
    # Inference does not change it.
    inference = nnx.view(model, deterministic=True)
    inference[0](x[:1])
    np.testing.assert_allclose(load_balancing_loss(inference), expected, rtol=1e-5)


def test_a_layer_without_a_load_has_no_balancing_loss():
    experts = build()
    assert experts.load is None
    with pytest.raises(ValueError, match=r"^model: expected Experts with track_load, .* got none$"):
        load_balancing_loss(experts)
    with pytest.raises(ValueError, match=r'^track_load: expected False with scores="sigmoid"'):
        build(scores="sigmoid", track_load=True)


def test_a_call_is_refused():
    experts, x = build(), tokens(6)
    with pytest.raises(ValueError, match=r"^active: expected shape \(6,\), got \(1,\)$"):
        experts(x, active=jnp.ones(1, bool))
    divided = nnx.view(experts, experts_axis="model")
    with pytest.raises(
        ValueError, match=r"^experts_axis: expected .*, which has \[\], got 'model'$"
    ):
        divided(x)
    mesh = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((3,), ("model",)))
    with mesh, pytest.raises(ValueError, match=r"^experts_axis: .* num_experts=8, got 3\b"):
        jax.eval_shape(divided, x)  # nothing is computed under an abstract mesh


def compare_divided_model() -> None:
    """Asserts that a model whose experts are divided computes what the plain one does."""
    config = CASES["Qwen35LanguageModel, experts"].config
    model = config.build(param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    inputs = np.arange(12).reshape(2, 6) % config.vocab_size

    @nnx.jit
    def logits_and_gradient(model: nnx.Module) -> tuple[jax.Array, Any]:
        def loss(model):
            logits = model(inputs)[0]
            return jnp.square(logits).mean(), logits

        (_, logits), gradient = nnx.value_and_grad(loss, has_aux=True)(model)
        return logits, gradient

    expected = jax.device_get(logits_and_gradient(model))
    mesh = jax.make_mesh((2,), ("model",), (AxisType.Auto,), devices=jax.devices()[:2])
    declared = declared_mesh_axes(model)
    with jax.set_mesh(mesh):
        for path, param in params_of(model).items():
            name, axis = declared.get(path) or ("", 0)
            spec = [*[None] * axis, "model"] if name == "experts" else []
            param.set_value(jax.device_put(param.get_value(), NamedSharding(mesh, P(*spec))))
        view = nnx.view(model, experts_axis="model")
        program = logits_and_gradient.lower(view).compile()
        found = jax.device_get(program(view))
    chex.assert_trees_all_close(jax.tree.leaves(found), jax.tree.leaves(expected), rtol=1e-9)
    assert "all-gather" not in program.as_text()


@pytest.mark.slow
def test_a_model_whose_experts_are_divided_computes_the_same(on_eight_devices):
    """No matrix of an expert is gathered, as it would be without `experts_axis`."""
    on_eight_devices(compare_divided_model)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, GROUPS], ids=["softmax", "groups"])
def test_a_program_for_any_number_of_tokens(options):
    call = jax.jit(build(**options).__call__)
    [batch] = export.symbolic_shape("batch")
    program = export.export(call)(jax.ShapeDtypeStruct((batch, 3, 5), jnp.float32))
    np.testing.assert_allclose(program.call(tokens(4, 3)), call(tokens(4, 3)), rtol=1e-5)
