"""Hawk beyond parity: which parameter it trains, and the bounds and initial values of `a`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

import torch_ref
import train.trainer.optimizer
from jax_models import (
    RGLRU,
    Hawk,
    HawkLanguageModelConfig,
    from_torch,
    project,
    to_torch,
)
from parity_tests import compare, draft_table
from parity_tests.engine.bounds.tolerance import assert_same
from train.run.config import PRESETS, from_fields, to_fields
from train.trainer.optimizer import OptimizerConfig, apply_gradient, build_optimizer


@pytest.mark.usefixtures("x64")
def test_a_of_zero_and_one_load_and_run():
    """As in the twin, a = 0 forgets everything and a = 1 ignores inputs. Gradients are finite."""
    twin = torch_ref.Hawk(4, parameterization="direct").double()
    x = torch.randn(2, 9, 4).double()
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


@pytest.mark.slow
@pytest.mark.parametrize("projects", [True, False])
def test_training_keeps_a_inside(monkeypatch, projects):
    """Without the projection, the steps would leave the interval."""
    if not projects:
        monkeypatch.setattr(train.trainer.optimizer, "project", lambda params: params)
    graphdef, params = nnx.split(RGLRU(8, parameterization="direct", rngs=nnx.Rngs(0)))
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


@pytest.mark.slow
def test_a_new_layer_trains_with_clipped_gradients():
    """With "direct" the gradient of `a` is so large that clipping leaves the others nothing."""
    x = np.random.default_rng(0).standard_normal((8, 32, 16)).astype(np.float32)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.3))

    def part_left(**options):
        """The last loss of a small regression as a part of the first."""
        graphdef, params = nnx.split(Hawk(16, rngs=nnx.Rngs(0), **options))

        def loss(params):
            return jnp.mean((nnx.merge(graphdef, params)(x)[0] - x.cumsum(1) / 2) ** 2)

        def step(carry, _):
            params, state = carry
            value, gradient = jax.value_and_grad(loss)(params)
            updates, state = optimizer.update(gradient, state)
            return (project(optax.apply_updates(params, updates)), state), value

        start = params, optimizer.init(params)
        losses = jax.jit(lambda: jax.lax.scan(step, start, length=400)[1])()
        return losses[-1] / losses[0]

    assert part_left() < 0.6
    assert part_left(parameterization="direct") > 0.9


def start(**options) -> jax.Array:
    """The initial `a` of 4,000 channels. The compiler removes the unused gates."""
    options["parameterization"] = "direct"
    return jax.jit(lambda: RGLRU(4000, rngs=nnx.Rngs(0), **options).a[...])()


def test_a_starts_as_in_the_paper():
    """It is uniform in [0.9, 0.999] to the power 1/c, and below 1 even in a narrow dtype."""
    for a, c in (
        (start(c=8.0), 8),
        (start(c=2.0), 2),
        (torch_ref.RGLRU(4000, parameterization="direct").a.detach().numpy(), 8),
    ):
        a_to_c = np.asarray(a) ** c
        assert a_to_c.min() == pytest.approx(0.9, abs=1e-3)
        assert a_to_c.max() == pytest.approx(0.999, abs=1e-3)
        assert a_to_c.mean() == pytest.approx(0.9495, abs=0.002)
    for dtype in (jnp.bfloat16, jnp.float16):
        narrow = start(param_dtype=dtype)
        assert narrow.dtype == dtype
        assert (narrow < 1).all()


def test_refuses_a_state_of_another_kind():
    layer, other = (RGLRU(4, scale_first_step=scale, rngs=nnx.Rngs(0)) for scale in (False, True))
    with pytest.raises(TypeError, match=r"state\.position:"):
        layer(np.ones((2, 3, 4), np.float32), other.init_state(2))


def test_the_preset_trains_by_softplus_and_an_old_run_keeps_its_parameterization():
    preset = PRESETS["hawk"]
    fields = to_fields(preset)
    assert from_fields(fields) == preset
    assert fields["model"].pop("parameterization") == "softplus"
    assert from_fields(fields).model == HawkLanguageModelConfig(parameterization="direct")


CONFIG = HawkLanguageModelConfig(
    vocab_size=11, features=4, num_layers=2, mlp_features=6, scan_layers=True
)
LAYERS = {
    "RGLRU": (lambda **k: RGLRU(4, **k), lambda p: torch_ref.RGLRU(4, parameterization=p)),
    "Hawk": (lambda **k: Hawk(4, **k), lambda p: torch_ref.Hawk(4, parameterization=p)),
    "language model": (
        lambda rngs, **k: dataclasses.replace(CONFIG, **k).build(rngs=rngs),
        lambda p: torch_ref.HawkLanguageModel(11, 4, 2, 6, parameterization=p),
    ),
}
"""For each layer, how to build it and, with a parameterization, its twin."""


def weights_of(twin: torch.nn.Module, prefix: str = "") -> dict[str, np.ndarray]:
    """Random weights of a twin, whose decays lie in [0, 1], which is right in both forms."""
    rng = np.random.default_rng(0)
    return {
        f"{prefix}{key}": rng.uniform(size=w.shape).astype(np.float32)
        for key, w in twin.state_dict().items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_trains_the_parameter_that_its_weights_have(name):
    """Without the option, weights of either form come back bit for bit, one after the other."""
    build, build_twin = LAYERS[name]
    layer = build(rngs=nnx.Rngs(0))
    x = np.ones((2, 5), int) if name == "language model" else np.ones((2, 5, 4), np.float32)
    forward = nnx.jit(lambda layer, x: layer(x)[0])
    gradients = nnx.jit(nnx.grad(lambda layer, x: layer(x)[0].sum()))
    assert to_torch(layer).keys() == build_twin("softplus").state_dict().keys()
    for form in ("direct", "softplus"):
        weights = weights_of(build_twin(form), "model.")
        assert from_torch(layer, weights, prefix="model.") is layer
        back = to_torch(layer, prefix="model.")
        assert back.keys() == weights.keys()
        for key, array in weights.items():
            np.testing.assert_array_equal(back[key], array)
        trained = jax.tree.structure(gradients(layer, x))
        assert trained == jax.tree.structure(nnx.state(layer, nnx.Param))
        fixed = from_torch(build(parameterization=form, rngs=nnx.Rngs(0)), weights, prefix="model.")
        np.testing.assert_array_equal(forward(layer, x), forward(fixed, x))


@pytest.mark.parametrize(
    ("name", "form"), [("RGLRU", "direct"), ("Hawk", "softplus"), ("language model", "direct")]
)
def test_a_layer_that_was_built_with_the_option_refuses_the_other_form(name, form):
    build, build_twin = LAYERS[name]
    [other] = {"direct", "softplus"} - {form}
    layer, weights = build(parameterization=form, rngs=nnx.Rngs(0)), weights_of(build_twin(other))
    before = to_torch(layer)
    message = rf'^state_dict: \S+: expected .*, because .*parameterization="{form}", got .*'
    with pytest.raises(ValueError, match=message) as raised:
        from_torch(layer, weights)
    assert "\n" not in str(raised.value)
    assert all(np.array_equal(to_torch(layer)[key], array) for key, array in before.items())


def test_wrong_weights_of_the_other_form_leave_a_layer_unchanged():
    layer, weights = Hawk(4, rngs=nnx.Rngs(0)), weights_of(LAYERS["Hawk"][1]("direct"))
    graphdef, before = nnx.split(layer)
    outside = np.array([-0.1, 0.5, 1.1, np.nan], np.float32)
    with pytest.raises(ValueError, match=r"rglru\.a: 3 of 4 values outside \[0, 1\]"):
        from_torch(layer, weights | {"rglru.a": outside})
    with pytest.raises(ValueError, match="epsilon=1e-06"):
        from_torch(RGLRU(4, epsilon=1e-6, rngs=nnx.Rngs(0)), weights, prefix="rglru.")
    assert nnx.graphdef(layer) == graphdef
    jax.tree.map(np.testing.assert_array_equal, nnx.state(layer), before)


class Net(nnx.Module):
    """A user's model around a Hawk, which has no layouts of its own."""

    def __init__(self, rngs: nnx.Rngs):
        self.hawk, self.out = Hawk(4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.hawk(x)[0])


class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer = torch_ref.Hawk(4, parameterization="direct")
        self.out = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.mixer(x)[0])


@pytest.mark.slow
def test_a_model_around_a_layer_agrees_with_the_other_form():
    """`draft_table` writes a table of its weights that leaves nothing open."""
    twin, model = TorchNet(), Net(nnx.Rngs(0))
    x = np.random.default_rng(0).standard_normal((2, 5, 4))
    code = draft_table(twin, model)
    assert "#" not in code
    exec(code, namespace := {"model": model})
    with jax.numpy_dtype_promotion("standard"):  # a user's nnx.Linear has no dtype
        report = compare(twin, model, x, weights=namespace["table"])
    assert report.passed, report
    assert model.hawk.rglru.parameterization == "softplus"  # the model itself is left unchanged
