"""Hawk beyond parity: the bounds and initial values of `a`, and long sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import torch_ref
import train.optimizer
from jax_models import RGLRU, Hawk, HawkLanguageModelConfig, from_torch, to_torch
from parity_tests.engine.bounds.tolerance import assert_same
from train.config import PRESETS, from_fields, to_fields
from train.optimizer import OptimizerConfig, apply_gradient, build_optimizer


@pytest.mark.usefixtures("x64")
def test_a_of_zero_and_one_load_and_run():
    """As in the twin, a = 0 forgets everything and a = 1 ignores inputs. Gradients are finite."""
    twin, x = torch_ref.Hawk(4).double(), torch.randn(2, 9, 4).double()
    with torch.no_grad():
        twin.rglru.a[:2] = torch.tensor([0.0, 1.0])
    layer = from_torch(Hawk(4, param_dtype=jnp.float64, rngs=nnx.Rngs(0)), twin.state_dict())
    graphdef, params = nnx.split(layer)

    def loss(params):
        y, state = nnx.merge(graphdef, params)(x.numpy())
        return jnp.sum(y**2), (y, state)

    gradients, (y, state) = jax.jit(jax.grad(loss, has_aux=True))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    np.testing.assert_array_equal(state.rglru.h[:, 1], 0)
    torch_y, _ = twin(x)
    torch_y.square().sum().backward()
    assert all(weight.grad.isfinite().all() for weight in twin.parameters())
    assert_same(y, torch_y.detach().numpy(), "outputs")


@pytest.mark.parametrize("projects", [True, False])
def test_training_keeps_a_inside(monkeypatch, projects):
    """Without the projection, the steps would leave the interval."""
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


def start(**options) -> jax.Array:
    """The initial `a` of 4,000 channels. The compiler removes the unused gates."""
    return jax.jit(lambda: RGLRU(4000, rngs=nnx.Rngs(0), **options).a[...])()


def test_a_starts_as_in_the_paper():
    """It is uniform in [0.9, 0.999] to the power 1/c, and below 1 even in a narrow dtype."""
    for a, c in (
        (start(c=8.0), 8),
        (start(c=2.0), 2),
        (torch_ref.RGLRU(4000).a.detach().numpy(), 8),
    ):
        a_to_c = np.asarray(a) ** c
        assert a_to_c.min() == pytest.approx(0.9, abs=1e-3)
        assert a_to_c.max() == pytest.approx(0.999, abs=1e-3)
        assert a_to_c.mean() == pytest.approx(0.9495, abs=0.002)
    for dtype in (jnp.bfloat16, jnp.float16):
        narrow = start(param_dtype=dtype)
        assert narrow.dtype == dtype
        assert (narrow < 1).all()


def with_a_outside():
    layer = Hawk(4, rngs=nnx.Rngs(0))
    weights = to_torch(layer)
    weights["rglru.a"] = np.array([-0.1, 0.5, 1.1, np.nan], np.float32)
    from_torch(layer, weights)


def with_a_state_of_another_kind():
    layer, other = (RGLRU(4, scale_first_step=scale, rngs=nnx.Rngs(0)) for scale in (False, True))
    layer(np.ones((2, 3, 4), np.float32), other.init_state(2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (with_a_outside, r"rglru\.a: 3 of 4 values outside \[0, 1\]"),
        (with_a_state_of_another_kind, r"state\.position:"),
    ],
)
def test_refuses(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_the_preset_trains_by_softplus_and_an_old_run_keeps_its_parameterization():
    preset = PRESETS["hawk"]
    fields = to_fields(preset)
    assert from_fields(fields) == preset
    assert fields["model"].pop("parameterization") == "softplus"
    assert from_fields(fields).model == HawkLanguageModelConfig()
