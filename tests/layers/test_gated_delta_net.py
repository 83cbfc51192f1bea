"""The initial decays of Gated DeltaNet, and its decays in 16 bits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_models import GatedDeltaNet
from jax_models.layers.gated_delta_net import bias_of_log_uniform, log_of_uniform

HEADS = 4096
build = partial(
    GatedDeltaNet,
    8,
    num_key_heads=1,
    num_value_heads=HEADS,
    key_features=2,
    value_features=1,
    rngs=nnx.Rngs(0),
)


def test_decays_start_as_in_qwen3_5():
    layer = build()
    A = np.exp(layer.A_log[...])
    assert 0.01 <= A.min() < 0.1
    assert 15.9 < A.max() <= 16.001
    assert A.mean() == pytest.approx(8, rel=0.05)
    assert (layer.dt_bias[...] == 1).all()


def test_decays_start_as_in_olmo_hybrid():
    floor = 3e-3
    layer = build(decay_init=log_of_uniform(0, 16), dt_init=bias_of_log_uniform(1e-3, 0.1, floor))
    assert np.isfinite(layer.A_log[...]).all()
    assert np.exp(layer.A_log[...]).max() <= 16.001
    dt = np.asarray(jax.nn.softplus(layer.dt_bias[...]), np.float64)
    assert dt.min() == pytest.approx(floor, rel=1e-4)
    assert dt.max() <= 0.1 * 1.0001
    logs = np.log(dt[dt > 1.001 * floor])  # uniform above the floor
    assert logs.mean() == pytest.approx(np.log([floor, 0.1]).mean(), abs=0.1)


def test_decays_are_in_float32_if_parameters_are_in_16_bits():
    """In bfloat16, exp(A_log) would lose all but two digits."""
    layer = build(param_dtype=jnp.bfloat16, dtype=jnp.bfloat16)
    layer.A_log[...] = jnp.linspace(-20, 20, HEADS).astype(jnp.bfloat16)
    a = jnp.full((1, 2, HEADS), 0.3, jnp.bfloat16)
    log_decay = layer.log_decay(a)
    A_log, dt_bias, a = (
        np.asarray(p, np.float64) for p in (layer.A_log[...], layer.dt_bias[...], a)
    )
    assert log_decay.dtype == jnp.float32
    expected = -np.exp(A_log) * np.log1p(np.exp(a + dt_bias))
    np.testing.assert_allclose(log_decay, expected, rtol=1e-5)
