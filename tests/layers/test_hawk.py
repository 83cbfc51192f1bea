"""Hawk beyond parity: where `a` may lie, where it starts, and long sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

import torch_ref
import train.optimizer
from jax_models import RGLRU, Hawk, HawkLanguageModelConfig, from_torch, ops, project, to_torch
from parity_tests.engine.bounds.tolerance import K, assert_same, rms
from train.config import PRESETS, from_fields, to_fields
from train.optimizer import OptimizerConfig, apply_gradient, build_optimizer


def seed_weights(features: int = 4) -> dict[str, torch.Tensor]:
    """A random Hawk's state_dict."""
    return {key: value.clone() for key, value in torch_ref.Hawk(features).state_dict().items()}


def test_weights_with_a_outside_are_refused_by_name_and_count():
    weights = seed_weights()
    weights["rglru.a"] = torch.tensor([-0.1, 0.5, 1.1, float("nan")])
    layer = Hawk(4, rngs=nnx.Rngs(0))
    before = to_torch(layer)
    with pytest.raises(ValueError, match=r"rglru\.a: 3 of 4 values outside \[0, 1\]"):
        from_torch(layer, weights)
    for key, array in to_torch(layer).items():
        np.testing.assert_array_equal(array, before[key])


def test_a_of_zero_and_one_load_and_run():
    """A = 0 forgets everything and a = 1 lets nothing in, as in the twin; gradients are finite."""
    twin, x = torch_ref.Hawk(4).double(), torch.randn(2, 9, 4).double()
    with torch.no_grad():
        twin.rglru.a[:2] = torch.tensor([0.0, 1.0])

    def loss(params, x):
        y, state = nnx.merge(graphdef, params)(x)
        return jnp.sum(y**2), (y, state)

    with jax.enable_x64(True):
        layer = from_torch(Hawk(4, param_dtype=jnp.float64, rngs=nnx.Rngs(0)), twin.state_dict())
        graphdef, params = nnx.split(layer)
        gradients, (y, state) = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x.numpy())
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    np.testing.assert_array_equal(state.rglru.h[:, 1], 0)
    torch_y, _ = twin(x)
    torch_y.square().sum().backward()
    assert all(weight.grad.isfinite().all() for weight in twin.parameters())
    assert_same(y, torch_y.detach().numpy(), "outputs")


class Regression(nnx.Module):
    """A layer between two linear maps."""

    def __init__(self, layer: type[RGLRU | Hawk], width: int):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Linear(1, width, rngs=rngs)
        self.layer = layer(width, parameterization="softplus", rngs=rngs)
        self.head = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(self.layer(self.embed(x))[0])


def sine_mixtures(key: jax.Array) -> jax.Array:
    """Eight signals of 97 steps, each the sum of three sines."""
    frequency, phase = jax.random.uniform(key, (2, 8, 3, 1))
    angle = (0.05 + 0.45 * frequency) * jnp.arange(97.0)[None, None] + 2 * jnp.pi * phase
    return jnp.sin(angle).sum(axis=1)[..., None]


@pytest.mark.parametrize("layer", [RGLRU, Hawk])
def test_a_new_layer_trains_under_gradient_clipping(layer):
    """With "direct", gradient norms reach 1e5 and the loss ends four times as high or more."""
    graphdef, params = nnx.split(Regression(layer, 32))
    optimizer = build_optimizer(OptimizerConfig(learning_rate=3e-3, clip_norm=1.0), num_steps=150)

    def loss(params, signals):
        prediction = nnx.merge(graphdef, params)(signals[:, :-1])
        return jnp.mean((prediction - signals[:, 1:]) ** 2)

    def step(carry, key):
        params, state = carry
        value, gradient = jax.value_and_grad(loss)(params, sine_mixtures(key))
        carry = apply_gradient(optimizer, gradient, state, params)
        return carry, (value, optax.tree.norm(gradient))

    keys = jax.random.split(jax.random.key(0), 150)
    start = (params, optimizer.init(params))
    _, (losses, norms) = jax.jit(lambda keys: jax.lax.scan(step, start, keys))(keys)
    assert norms.max() < 100
    assert losses[-10:].mean() < 0.05 * losses[0]


@pytest.mark.parametrize("projects", [True, False])
def test_training_keeps_a_inside(monkeypatch, projects):
    """Steps that would leave the interval, as they do without the projection."""
    if not projects:
        monkeypatch.setattr(train.optimizer, "project", lambda params: params)
    graphdef, params = nnx.split(RGLRU(8, rngs=nnx.Rngs(0)))
    x = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)
    optimizer = build_optimizer(OptimizerConfig(learning_rate=1.0), num_steps=2)
    state = optimizer.init(params)

    def loss(params, sign):
        return sign * jnp.sum(nnx.merge(graphdef, params)(x)[0] ** 2)

    inside = []
    for sign in (1.0, -1.0):
        gradient = jax.grad(loss)(params, sign)
        params, state = apply_gradient(optimizer, gradient, state, params)
        inside.append(bool(((params["a"][...] >= 0) & (params["a"][...] <= 1)).all()))
    assert all(inside) == projects


def test_an_a_outside_counts_as_the_nearest_end_and_project_moves_it_there():
    layer = RGLRU(3, rngs=nnx.Rngs(0))
    layer.a[...] = jnp.array([-0.5, 0.5, 1.5])
    x = np.random.default_rng(0).standard_normal((2, 5, 3)).astype(np.float32)
    y, _ = layer(x)
    assert np.isfinite(y).all()
    nnx.update(layer, project(nnx.state(layer, nnx.Param)))
    np.testing.assert_array_equal(layer.a[...], [0.0, 0.5, 1.0])
    np.testing.assert_array_equal(layer(x)[0], y)


def start(**options) -> jax.Array:
    """`a` of 4,000 channels; compiled, so that no gates are drawn."""
    return jax.jit(lambda: RGLRU(4000, rngs=nnx.Rngs(0), **options).a[...])()


def test_a_starts_as_in_the_paper():
    for c in (8.0, 2.0):
        a_to_c = np.asarray(start(c=c)) ** c
        assert 0.9 <= a_to_c.min() < 0.901
        assert 0.998 < a_to_c.max() <= 0.999 + 1e-6
        assert a_to_c.mean() == pytest.approx(0.9495, abs=0.002)
    with torch.no_grad():
        twin = torch_ref.RGLRU(4000).a ** 8
        assert twin.min() >= 0.9 - 1e-5
        assert twin.max() <= 0.999 + 1e-5


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_no_channel_starts_dead_in_a_narrow_dtype(dtype):
    a = start(param_dtype=dtype)
    assert a.dtype == dtype
    assert (a < 1).all()


@pytest.mark.optimized
@pytest.mark.parametrize("method", ["sequential", "associative", "chunked"])
def test_long_memories_survive_float32(method):
    """1,024 steps at decays next to 1, against float64: as exact as the twin's step by step.

    Over sixteen sequences: of one, the twin's error may be small by chance.
    """
    torch.manual_seed(0)
    twin = torch_ref.RGLRU(8)
    with torch.no_grad():
        twin.a.copy_(1 - 2.0 ** -torch.arange(13.0, 21))
    weights, x = twin.state_dict(), torch.randn(16, 1024, 8)

    def run_twin(dtype):
        with torch.no_grad():
            return twin.to(dtype)(x.to(dtype))[0]

    plain = run_twin(torch.float32).double().numpy()
    exact = run_twin(torch.float64).numpy()
    layer = from_torch(RGLRU(8, method=method, rngs=nnx.Rngs(0)), weights)
    ours = np.asarray(jax.jit(layer.__call__)(x.numpy())[0], np.float64)
    assert rms(ours - exact) <= K * rms(plain - exact)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda r: RGLRU(4, num_blocks=2, parameterization="direct", rngs=r), "parameterization:"),
        (lambda r: RGLRU(4, epsilon=1e-6, rngs=r), "epsilon:"),
    ],
)
def test_refuses(build, message):
    with pytest.raises(ValueError, match=message):
        build(nnx.Rngs(0))


@pytest.mark.parametrize("options", [{}, {"num_blocks": 2}, {"parameterization": "softplus"}])
def test_the_unscaled_first_step_is_that_of_each_document(options):
    """From no state, from `init_state`, by steps, at a reset and beyond; h is i ⊙ x there."""
    layer = RGLRU(4, scale_first_step=False, rngs=nnx.Rngs(0), **options)
    x = np.random.default_rng(0).standard_normal((2, 5, 4)).astype(np.float32)
    y, last = layer(x)
    gate = jax.nn.sigmoid(ops.affine(x[:, 0], layer.input_gate.kernel[...]))
    np.testing.assert_allclose(y[:, 0], gate * x[:, 0], rtol=1e-6)
    np.testing.assert_array_equal(last.position, [5, 5])

    state, steps = layer.init_state(2), []
    for t in range(5):
        y_t, state = layer.step(x[:, t], state)
        steps.append(y_t)
    np.testing.assert_allclose(np.stack(steps, axis=1), y, rtol=1e-5, atol=1e-6)

    packed, after = layer(np.tile(x, (1, 2, 1)), reset=np.tile(np.arange(10) == 5, (2, 1)))
    np.testing.assert_allclose(packed, np.tile(y, (1, 2, 1)), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(after.position, [5, 5])


def test_a_state_without_its_position_is_refused():
    layer = RGLRU(4, scale_first_step=False, rngs=nnx.Rngs(0))
    other = RGLRU(4, rngs=nnx.Rngs(0)).init_state(2)
    with pytest.raises(TypeError, match=r"state\.position:"):
        layer(np.ones((2, 3, 4), np.float32), other)


def test_the_preset_trains_by_softplus_and_an_old_run_keeps_its_parameterization():
    preset = PRESETS["hawk"]
    fields = to_fields(preset)
    assert from_fields(fields) == preset
    assert fields["model"].pop("parameterization") == "softplus"
    assert from_fields(fields).model == HawkLanguageModelConfig()
