"""The modal convolution of StripedHyena: its chunks, its memory and its first filters."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_models import StripedHyenaMixer
from jax_models.ops import ModalConvState, modal_conv
from jax_models.ops.linear.modal_conv.chunked import CHUNK
from parity_tests.engine.bounds.tolerance import K, assert_same, rms, ulp

BATCH, FEATURES, MODES = 3, 4, 5


def problem(time: int):
    """Inputs, a state and filters, with poles of 0, 1 and −1 among them."""
    rng = np.random.default_rng(time)
    poles = rng.uniform(0, 0.999, (FEATURES, MODES)) * np.exp(
        1j * rng.uniform(-np.pi, np.pi, (FEATURES, MODES))
    )
    poles[0, :3] = 0, 1, -1
    weights = {
        "poles": np.stack([poles.real, poles.imag], axis=-1),
        "residues": rng.standard_normal((FEATURES, MODES, 2)),
        "skip": rng.standard_normal(FEATURES),
    }
    v = rng.standard_normal((BATCH, time, FEATURES))
    return v, rng.standard_normal((BATCH, FEATURES, MODES, 2)), weights


def form(method):
    """The modal convolution in this form, compiled."""
    return jax.jit(
        lambda v, modes, weights, **masks: modal_conv(
            v, ModalConvState(modes), **weights, **masks, method=method
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("time", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_chunks_are_the_definition(x64, time, masked):
    masks, active = {}, np.full((BATCH, time), True)
    if masked:
        lengths = np.array([time, min(time, CHUNK), time // 2])
        active = np.arange(time) < lengths[:, None]
        masks = {"lengths": lengths, "reset": np.random.default_rng(0).random(active.shape) < 0.1}
    (y, state), (expected, last) = (
        form(method)(*problem(time), **masks) for method in ("chunked", "definition")
    )
    assert_same(np.asarray(y)[active], np.asarray(expected)[active], "y")
    assert_same(state.modes, last.modes, "the state")


def test_float32_errs_as_the_definition_does():
    arrays = jax.tree.map(np.float32, problem(1000))
    with jax.enable_x64(True):
        exact = np.asarray(form("definition")(*jax.tree.map(np.float64, arrays))[0])
    error, plain = (
        rms(np.asarray(form(method)(*arrays)[0]) - exact) for method in ("chunked", "definition")
    )
    assert error <= K * max(plain, ulp(np.float32) * rms(exact))


@pytest.mark.optimized
def test_memory_of_whole_sequences_has_no_factor_for_the_modes():
    """With 32 modes, storing each step's state would take 64 times the memory of the inputs."""
    mixer = StripedHyenaMixer(64, state_size=32, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(mixer)
    x = jax.ShapeDtypeStruct((1, 8192, 64), jnp.float32)

    def loss(params, x):
        return jnp.sum(nnx.merge(graphdef, params)(x)[0] ** 2)

    memory = jax.jit(jax.grad(loss)).lower(params, x).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 50 * x.size * 4


def test_filters_at_first_have_energy_1_and_remember():
    mixer = StripedHyenaMixer(512, rngs=nnx.Rngs(0))
    impulse = jnp.zeros((1, 4096, 512)).at[:, 0].set(1)
    state = ModalConvState(jnp.zeros((1, 512, 8, 2)))
    weights = {"poles": mixer.poles[...], "residues": mixer.residues[...]}
    h, _ = jax.jit(partial(modal_conv, skip=jnp.zeros(512), **weights))(impulse, state)
    assert 0.8 < float(jnp.mean(jnp.sum(h**2, axis=1))) < 1.25
    assert float(jnp.mean(h[:, 32:] ** 2)) > 0


def test_a_gradient_has_the_form_of_the_platform_that_it_is_lowered_for():
    def loss(v, **weights):
        state = ModalConvState(jnp.zeros((1, 3, 2, 2)))
        return jnp.sum(modal_conv(v, state, **weights)[0])

    weights = {name: jnp.ones((3, 2, 2)) for name in ("poles", "residues")}
    traced = jax.jit(jax.grad(loss)).trace(jnp.ones((1, 64, 3)), skip=jnp.ones(3), **weights)
    in_steps = {
        platform: "stablehlo.while" in traced.lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "cuda")
    }
    assert in_steps == {"cpu": True, "cuda": False}
