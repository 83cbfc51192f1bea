"""`Linear`, whose product with a single row is split on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
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


def assert_close(found, layer, x):
    """Sums of 1,024 products in any order differ from the exact sum by at most this bound."""
    kernel, bias = (np.float64(parameter[...]) for parameter in (layer.kernel, layer.bias))
    x = np.float64(x).reshape(-1, 1024)
    bound = 1025 * np.finfo(np.float32).eps / 2 * (np.abs(x) @ np.abs(kernel) + np.abs(bias))
    assert (np.abs(np.reshape(found, bound.shape) - (x @ kernel + bias)) <= bound).all()


def test_a_single_row_is_split():
    layer = linear()
    assert is_split(layer, X)
    assert_close(layer(X), layer, X)


def test_derivatives_are_those_of_the_plain_product():
    def gradients(layer):
        return nnx.grad(lambda layer, x: jnp.sin(layer(x)).sum(), argnums=(0, 1))(layer, X)

    found, plain = gradients(linear()), gradients(linear(dot_general=jax.lax.dot_general))
    jax.tree.map(np.testing.assert_array_equal, *map(jax.tree.leaves, (found, plain)))


def test_single_rows_under_vmap_are_one_product():
    layer, x = linear(), jax.random.normal(jax.random.key(1), (3, 1, 1024))
    assert not is_split(jax.vmap(layer), x)
    assert_close(jax.vmap(layer)(x), layer, x)


def test_products_that_would_not_be_faster_are_not_split():
    layer = linear()
    assert not is_split(layer, X, "cuda")
    assert not is_split(layer, X, "tpu")
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
    assert_close(exported.call(X), layer, X)
