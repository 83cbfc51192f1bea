"""`Linear`, whose product of a single row is computed in parts on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_models.layers.linear import PARTS, Linear


def linear(**options):
    """A layer large enough for partial products, with a bias that is not zero."""
    options = {"bias_init": nnx.initializers.normal(), **options}
    return Linear(1024, 512, rngs=nnx.Rngs(0), **options)


def uses_parts(layer, x):
    return f"{PARTS}x1x512x" in jax.jit(lambda x: layer(x)).lower(x).as_text()


@pytest.mark.parametrize("use_bias", [True, False])
def test_values_and_gradients_of_one_row_match_the_plain_product(use_bias):
    layer = linear(use_bias=use_bias)
    x = jax.random.normal(jax.random.key(1), (1, 1, 1024))
    assert uses_parts(layer, x)

    def loss(layer, x, call):
        y = call(layer, x)
        return jnp.sum(jnp.sin(y)), y

    run = nnx.grad(loss, argnums=(0, 1), has_aux=True)
    in_parts, plain = run(layer, x, Linear.__call__), run(layer, x, nnx.Linear.__call__)
    for got, expected in zip(jax.tree.leaves(in_parts), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_each_row_of_a_vmapped_call_matches_the_plain_product():
    layer, x = linear(), jax.random.normal(jax.random.key(1), (3, 1, 1024))
    np.testing.assert_allclose(jax.vmap(layer)(x), nnx.Linear.__call__(layer, x), atol=1e-5)


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_other_platforms_compute_one_product(backend, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert not uses_parts(linear(), jnp.ones((1, 1024)))


def test_products_that_would_not_be_faster_are_computed_at_once():
    assert not uses_parts(linear(), jnp.ones((2, 1024)))
    assert not uses_parts(linear(dtype=jnp.bfloat16), jnp.ones((1, 1024)))
    small = Linear(64, 512, rngs=nnx.Rngs(0))
    assert not uses_parts(small, jnp.ones((1, 64)))


def test_a_symbolic_number_of_rows_is_exported():
    layer = linear()
    (rows,) = jax.export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((rows, 1024), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: layer(x)))(x)
    row = jax.random.normal(jax.random.key(1), (1, 1024))
    np.testing.assert_allclose(exported.call(row), layer(row), atol=1e-5)
