"""`Linear`, whose product with a single row is split on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_models.layers.linear import Linear


def linear(**options):
    """A layer large enough to be split, with a bias that is not zero."""
    options = {"bias_init": nnx.initializers.normal(), **options}
    return Linear(1024, 512, rngs=nnx.Rngs(0), **options)


def is_split(function, x, platform="cpu"):
    traced = jax.jit(function).trace(x)
    return "8x1x512x" in traced.lower(lowering_platforms=(platform,)).as_text()


X = jax.random.normal(jax.random.key(1), (1, 1024))


@pytest.mark.parametrize("use_bias", [True, False])
def test_values_and_gradients_of_one_row_match_the_plain_product(use_bias):
    layer = linear(use_bias=use_bias)
    assert is_split(layer, X)
    np.testing.assert_allclose(layer(X), nnx.Linear.__call__(layer, X), atol=1e-4)

    def loss(layer, x, call):
        return jnp.sum(jnp.sin(call(layer, x)))

    run = nnx.grad(loss, argnums=(0, 1))
    found, plain = run(layer, X[None], Linear.__call__), run(layer, X[None], nnx.Linear.__call__)
    for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_single_rows_under_vmap_are_one_product():
    layer, x = linear(), jax.random.normal(jax.random.key(1), (3, 1, 1024))
    assert not is_split(jax.vmap(layer), x)
    np.testing.assert_allclose(jax.vmap(layer)(x), layer(x), atol=1e-5)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_other_platforms_compute_one_product(platform):
    assert not is_split(linear(), X, platform)


def test_products_that_would_not_be_faster_are_not_split():
    layer = linear()
    assert not is_split(layer, jnp.ones((2, 1024)))
    assert not is_split(jax.grad(lambda x: layer(x).sum()), X)
    assert not is_split(linear(dtype=jnp.bfloat16), X)
    assert not is_split(linear(dot_general=jax.lax.dot_general), X)
    assert not is_split(Linear(64, 512, rngs=nnx.Rngs(0)), jnp.ones((1, 64)))


def test_a_symbolic_number_of_rows_is_exported():
    layer = linear()
    (rows,) = jax.export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((rows, 1024), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: layer(x)))(x)
    np.testing.assert_allclose(exported.call(X), layer(X), atol=1e-4)
