"""The loops of gated recurrences, and the products that a step asks for.

`test_derivatives.py` tests the derivatives, and the registry the results.
"""

from functools import partial

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_models import GRU, LSTM, RNN, HyperLSTM, LayerNormLSTM, ops


@pytest.mark.parametrize("layer", [RNN, LSTM, GRU])
def test_the_loops_have_one_product_each(layer):
    """Gradients of kernels, biases and x are computed after the backward loop."""
    graphdef, params = nnx.split(layer(3, 5, rngs=nnx.Rngs(0)))
    masks = {"lengths": jnp.array([6, 2, 0]), "reset": jnp.zeros((3, 6), bool)}

    def loss(params, x):
        return nnx.merge(graphdef, params)(x, **masks)[0].sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(params, jnp.ones((3, 6, 3)))
    assert list(products_in_loops(jaxpr.jaxpr)) == [1, 1]


@pytest.mark.parametrize(
    ("layer", "products"),
    [(partial(LayerNormLSTM, 3, 5), 1), (partial(HyperLSTM, 3, 5, 4, 2), 4)],
)
def test_only_what_is_recurrent_is_in_the_loop(layer, products):
    """A HyperLSTM has products of h, of h with ĥ, of ĥ and of z, but none of x."""
    layer = layer(rngs=nnx.Rngs(0))
    jaxpr = jax.make_jaxpr(lambda x: layer(x)[0])(jnp.ones((2, 6, 3)))
    assert list(products_in_loops(jaxpr.jaxpr)) == [products]


def products_in_loops(jaxpr):
    """The number of `dot_general` in the body of each scan."""
    for equation in jaxpr.eqns:
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            if equation.primitive.name == "scan":
                yield str(inner).count("dot_general[")
            else:
                yield from products_in_loops(inner)


@pytest.mark.parametrize(
    "ask",
    [
        lambda now, h: now.product("a", h) + now.product("a", h),
        lambda now, h: h,
        lambda now, h: sum(now.products(["a", "b"], h)),  # one of them has a bias
    ],
)
def test_a_step_asks_for_each_product_once(ask):
    def step(state, now):
        return ops.RNNState(ask(now, state.h))

    products = {"a": ops.Product(jnp.eye(3)), "b": ops.Product(jnp.eye(3), jnp.ones(3))}
    with pytest.raises(ValueError, match=r"^step: "):
        ops.recurrence(step, ops.RNNState(jnp.ones((2, 3))), products, jnp.ones((2, 4, 3)))
