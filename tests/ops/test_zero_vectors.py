"""Norms and quotients of zero vectors: finite values, and finite gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_models import ops
from jax_models.layers.hippogriff import HippogriffNorm
from jax_models.layers.hyena import normalized
from jax_models.layers.norm import GroupNorm, LayerNorm, RMSNorm, ZeroCenteredRMSNorm
from jax_models.layers.striped_hyena import StripedHyenaNorm

RNGS = {"rngs": nnx.Rngs(0)}
DTYPES = {"dtype": None, "param_dtype": jnp.float32}
FUNCTIONS = {
    "l2_normalize": ops.l2_normalize,
    "LayerNorm": LayerNorm(8, **RNGS),
    "GroupNorm": GroupNorm(8, num_groups=2, **RNGS),
    "RMSNorm": RMSNorm(8, **RNGS),
    "ZeroCenteredRMSNorm": ZeroCenteredRMSNorm(8, **RNGS),
    "HippogriffNorm": HippogriffNorm(8, **DTYPES, **RNGS),
    "StripedHyenaNorm": StripedHyenaNorm(8, 1e-5, **DTYPES, **RNGS),
    "Hyena's normalized": lambda x: normalized(x[..., None]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_zero_vectors_have_finite_values_and_gradients(name):
    """Beside one that is not zero."""
    x = jnp.zeros((3, 8)).at[1].set(1)
    y, pullback = jax.vjp(FUNCTIONS[name], x)
    assert jnp.isfinite(y).all()
    assert jnp.isfinite(pullback(jnp.ones_like(y))[0]).all()
    np.testing.assert_array_equal(y[0], 0)


def test_l2_normalize_is_the_equation(x64):
    x = np.random.default_rng(0).standard_normal((3, 4, 8))
    expected = x / np.sqrt((x**2).sum(-1, keepdims=True) + 0.5)
    np.testing.assert_allclose(ops.l2_normalize(x, epsilon=0.5), expected, rtol=1e-14)


def test_l2_normalize_sums_in_float32():
    x = jnp.full((1, 4096), 300, "float16")  # the sum of squares is beyond float16
    y = ops.l2_normalize(x)
    assert y.dtype == jnp.float16
    np.testing.assert_allclose(y, 1 / 64, rtol=1e-3)


@pytest.mark.parametrize("epsilon", [0, -1.0])
def test_l2_normalize_refuses_an_epsilon_that_is_not_positive(epsilon):
    with pytest.raises(ValueError, match="epsilon:"):
        ops.l2_normalize(jnp.ones(3), epsilon=epsilon)


def test_left_pads_of_gated_deltanet_leave_the_gradient_finite():
    x = jnp.zeros((2, 20, 6)).at[:, 5:].set(jax.random.normal(jax.random.key(0), (2, 15, 6)))

    def loss(kernel):
        q, k, v = jnp.split((x @ kernel).reshape(2, 20, 2, 12), 3, axis=-1)
        q, k = ops.l2_normalize(q), ops.l2_normalize(k)
        y, last = ops.delta_rule(q, -0.1 * jnp.ones_like(k), k, v, k, -0.9 * k)
        return jnp.sum(y**2) + jnp.sum(last**2)

    kernel = jax.random.normal(jax.random.key(1), (6, 24))
    assert jnp.isfinite(jax.grad(loss)(kernel)).all()
